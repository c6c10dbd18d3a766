"""A machine of several, as a process: the limits of a gateway, told on stdin what to do.

    python -m tests.admission.machine URL LIMITS

Reads a line `admit N` (as many requests one after the other), `drain` (until none passes any more), `back` (give leases back) or `state`, and
answers each with a line of JSON: `passed`, and whether it counts with the others (`up`).
"""

from __future__ import annotations

import asyncio
import json
import sys

from tidegate.admission.leases import Leases
from tidegate.admission.limits import Limits
from tidegate.admission.prices import Prices
from tidegate.admission.settings import LimitSettings, PriceSettings
from tidegate.core.ask import Caller
from tidegate.core.errors import RateLimited
from tidegate.stores.settings import ValkeySettings
from tidegate.stores.systems.valkey import Valkey

KEY = Caller("key", "tenant")


async def main(url: str, settings: str) -> None:
    rules = LimitSettings.model_validate_json(settings)
    leases = Leases(Valkey(ValkeySettings(url=url, timeout_s=0.5)), rules.when_lost, rules.machines)
    limits = Limits(rules, prices=Prices({"m": PriceSettings(input=1_000_000.0)}), leases=leases)
    keeping = asyncio.create_task(limits.keep())
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := (await reader.readline()).split():
        passed = 0
        if line[0] == b"admit":
            passed = sum([await one(limits) for _ in range(int(line[1]))])
        elif line[0] == b"drain":
            refused = 0
            while refused < 3:
                got = await one(limits)
                passed, refused = passed + got, refused + (not got)
                await asyncio.sleep(0 if got else 0.15)
        elif line[0] == b"back":
            await leases.give_back()
        print(json.dumps({"passed": passed, "up": leases.up}), flush=True)
    keeping.cancel()


async def one(limits: Limits) -> bool:
    try:
        ticket = limits.admit(KEY, 1, 0, "m")
        if ticket.waits:
            ticket = await ticket.leased()
    except RateLimited:
        return False
    ticket.settle(1)
    return True


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
