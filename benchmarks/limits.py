"""What limits cost for each request: in this process, in memory that workers share, and leased from Valkey. Writes results/limits.json.

    .venv/bin/python benchmarks/limits.py

Each figure is the best of many short rounds, in turns, so that a neighbour's load does not fall on one of them alone: microseconds for one
`admit` and one `settle`. Beside them: two processes on one book at the same time, and how many requests waited for the server.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from typing import Any

import common

from tidegate.admission.leases import Leases
from tidegate.admission.limits import Limits
from tidegate.admission.prices import Prices
from tidegate.admission.settings import Allowance, LimitSettings, PriceSettings
from tidegate.admission.shared import SharedBook
from tidegate.core.ask import Caller
from tidegate.core.chunk import Usage
from tidegate.core.errors import RateLimited
from tidegate.stores.settings import ValkeySettings
from tidegate.stores.systems.valkey import Valkey

sys.path.insert(0, str(common.ROOT))
from tests.stores.valkey_server import running  # the server's binary is one of the tests' tools

KEY = Caller("key", "tenant")
TWO = LimitSettings(requests_per_minute=100_000_000, tokens_per_minute=2_000_000_000)
ALL = LimitSettings(
    requests_per_minute=100_000_000, tokens_per_minute=2_000_000_000, concurrent=1000, money_per_day=100_000.0,
    tenants={"tenant": Allowance(requests_per_minute=100_000_000, tokens_per_minute=2_000_000_000, concurrent=1000, money_per_day=100_000.0)},
    capabilities={"g/c": Allowance(requests_per_minute=100_000_000, tokens_per_minute=2_000_000_000, concurrent=1000, money_per_day=100_000.0)},
)
PRICES = Prices({"m": PriceSettings(input=0.01, output=0.02)})
ROUNDS, CALLS = 150, 1000
WALKED = 50_000


def run_of(limits: Limits, capability: str = "") -> Callable[[], None]:
    usage = Usage(200, 100)

    def run() -> None:
        for _ in range(CALLS):
            limits.admit(KEY, 200, 256, "m", capability).book(usage, "m")

    return run


def best_us(runs: dict[str, Callable[[], None]]) -> dict[str, float]:
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(ROUNDS):
        for name, run in runs.items():
            began_ns = time.perf_counter_ns()
            run()
            best[name] = min(best[name], (time.perf_counter_ns() - began_ns) / CALLS / 1e3)
    return {name: round(us, 2) for name, us in best.items()}


def shared_book() -> SharedBook:
    book = SharedBook(1000, 2)
    book.join(0)
    return book


async def leased(url: str, settings: LimitSettings, book: SharedBook | None = None) -> tuple[Limits, Leases]:
    leases = Leases(Valkey(ValkeySettings(url=url, timeout_s=5)), "share", 2)
    limits = Limits(settings, prices=PRICES, leases=leases, book=book)
    (await limits.admit(KEY, 200, 256, "m").leased()).settle(1)
    for seat in next(iter(limits._plans.values())).seats:
        limits.book.add(seat.at, [(5 + kind, 10**12) for kind in range(3)], ())  # a lease that no round can use up
    return limits, leases


async def costs(url: str) -> dict[str, float]:
    in_process, _ = await leased(url, TWO)
    by_workers, _ = await leased(url, TWO, shared_book())
    return best_us({
        "no limit": run_of(Limits()),
        "requests and tokens of a key, one process": run_of(Limits(TWO)),
        "requests, tokens, money and runs of key, tenant and capability, one process": run_of(Limits(ALL, prices=PRICES), "g/c"),
        "requests and tokens of a key, workers": run_of(Limits(TWO, book=shared_book())),
        "requests, tokens, money and runs of key, tenant and capability, workers": run_of(Limits(ALL, prices=PRICES, book=shared_book()), "g/c"),
        "requests and tokens of a key, leased, one process": run_of(in_process),
        "requests and tokens of a key, leased, workers": run_of(by_workers),
    })


def two_at_once() -> dict[str, Any]:
    """Two processes on one key of one book, as fast as they can."""
    book = SharedBook(1000, 2)
    context = multiprocessing.get_context("fork")
    told = context.Queue()

    def hammer(worker: int) -> None:
        book.join(worker)
        run = run_of(Limits(TWO, book=book))
        run()
        began_ns, cpu_ns = time.perf_counter_ns(), time.process_time_ns()
        for _ in range(50):
            run()
        told.put(((time.perf_counter_ns() - began_ns) / 50 / CALLS / 1e3, (time.process_time_ns() - cpu_ns) / 50 / CALLS / 1e3))

    gc.freeze()
    workers = [context.Process(target=hammer, args=(worker,)) for worker in range(2)]
    for worker in workers:
        worker.start()
    figures = [told.get() for _ in workers]
    for worker in workers:
        worker.join()
    return {"us": round(max(wall for wall, _ in figures), 2), "cpu_us": round(max(cpu for _, cpu in figures), 2)}


async def waiting(url: str, per_minute: int, machines: int = 2) -> dict[str, Any]:
    """Requests of one key on several machines, in turns: how many of those that passed waited for the server, and how often it was asked."""
    stores = [Valkey(ValkeySettings(url=url, timeout_s=5, prefix=f"w{per_minute}:")) for _ in range(machines)]
    asked, took_us, waited, refused = 0, [], 0, 0
    for store in stores:
        renew = store.renew

        async def counted(machine: str, slots_s: float, asks: Any, renew: Any = renew) -> Any:
            nonlocal asked
            asked += 1
            began_ns = time.perf_counter_ns()
            answers = await renew(machine, slots_s, asks)
            took_us.append((time.perf_counter_ns() - began_ns) / 1e3)
            return answers

        store.renew = counted  # type: ignore[method-assign]
    limits = [Limits(LimitSettings(requests_per_minute=per_minute), leases=Leases(store, "share", machines)) for store in stores]
    passed = 0
    for turn in range(WALKED):
        try:
            ticket = limits[turn % machines].admit(KEY, 200)
            if ticket.waits:
                waited += 1
                ticket = await ticket.leased()
            ticket.settle(300)
            passed += 1
        except RateLimited:
            refused += 1
        await asyncio.sleep(0)
    took_us.sort()
    for one in limits:
        await one.close()
    return {
        "limit_per_minute": per_minute, "machines": machines, "passed": passed, "refused": refused, "waited": waited,
        "waited_share_of_passed": round(waited / passed, 5), "questions": asked, "question_p50_us": round(took_us[len(took_us) // 2], 1),
    }


def main() -> None:
    with running() as server:
        body = {
            "us_per_request": asyncio.run(costs(server.url)),
            "two_processes_on_one_key": two_at_once(),
            "leases": [asyncio.run(waiting(server.url, per_minute)) for per_minute in (60_000, 600_000)],
        }
    print(json.dumps(body, indent=1))
    print(common.record("limits", body))


if __name__ == "__main__":
    main()
