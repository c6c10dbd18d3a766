"""Parts that the benchmarks share: a real database, a gateway on it, and what a process costs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidegate.local.engine import LocalEngine

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def rss_mb(pid: int) -> float:
    """Resident memory of a process in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"process {pid} has no VmRSS")


class Others:
    """How many cores, on average, were used by what is none of ours; NaN until it is known."""

    cores = math.nan


@contextlib.contextmanager
def used_by_others() -> Iterator[Others]:
    """Measured from here to the end of the block: what the machine's processors did, less this process and all that it has started."""
    others, own = Others(), _own_cpu_s()
    busy, began_s = _busy_s(), time.perf_counter()
    yield others
    took_s = time.perf_counter() - began_s
    others.cores = round((_busy_s() - busy - (_own_cpu_s() - own)) / took_s, 2)


def _busy_s() -> float:
    """CPU seconds of all processes, those of other guests of the host (steal) included."""
    user, nice, system, _idle, _wait, irq, soft, steal = map(int, Path("/proc/stat").read_text().split(None, 9)[1:9])
    return (user + nice + system + irq + soft + steal) / _TICKS


def _own_cpu_s() -> float:
    """CPU seconds of this process and of its descendants."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parents[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
    ours, found = 0.0, [os.getpid()]
    while found:
        pid = found.pop()
        with contextlib.suppress(OSError):
            ours += cpu_s(pid)
        found += [one for one, parent in parents.items() if parent == pid]
    return ours


@contextlib.contextmanager
def database(shared_buffers_mb: int = 128) -> Iterator[tuple[Path, str, str]]:
    """A fresh embedded PostgreSQL with the schema and one data key: (folder, dsn, key)."""
    from tidegate.local.folder import DataFolder
    from tidegate.local.postgres import Postgres as Server
    from tidegate.local.settings import LocalSettings
    from tidegate.stores.migrate import migrate

    with tempfile.TemporaryDirectory(prefix="tg-", dir="/tmp") as home:
        Path(home).chmod(0o711)
        folder = DataFolder(Path(home) / "db")
        folder.open(min_free_mb=0)
        server = Server(folder, LocalSettings(data=str(folder.path), postgres_shared_buffers_mb=shared_buffers_mb))
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(server.start())
            migrate(server.dsn)
            yield Path(home), server.dsn, add_key(server.dsn, "bench")
        finally:
            loop.run_until_complete(server.stop())
            loop.close()
            folder.close()


@contextlib.contextmanager
def embedded_engine(home: Path, **settings: Any) -> Iterator[LocalEngine]:
    """The embedded llama.cpp with the packaged model, in a data folder below `home`. `settings`: of `[local]`."""
    from tidegate.local.engine import LocalEngine
    from tidegate.local.folder import DataFolder
    from tidegate.local.settings import LocalSettings

    folder = DataFolder(home / "engine")
    folder.open(min_free_mb=0)
    engine = LocalEngine(folder, LocalSettings(data=str(folder.path), **settings))
    with asyncio.Runner() as loop:
        try:
            loop.run(engine.child.start())
            yield engine
        finally:
            loop.run(engine.child.stop())
            engine.release()
            folder.close()


@contextlib.contextmanager
def gateway(home: Path, dsn: str, section: str, is_ready: Callable[[str], bool] = lambda url: True) -> Iterator[str]:
    """The address of a gateway that has just been started. `section`: what stands under `[engines.real]`, and whatever follows."""
    config, note = home / "gateway.toml", home / "data" / "run" / "gateway.json"
    note.unlink(missing_ok=True)
    config.write_text(
        f'[store]\ndsn = "{dsn}"\n[server]\nport = 0\n[local]\ndata = "{home / "data"}"\nembedder = false\n[log]\nflights = "errors"\n'
        f"[engines.real]\n{section}\n"
    )
    process = subprocess.Popen([sys.executable, "-m", "tidegate.cli", "serve", "--config", str(config)])
    try:
        for _ in range(600):
            if note.exists() and (said := note.read_bytes()) and is_ready(url := json.loads(said)["url"]):
                break
            time.sleep(0.1)
        else:
            raise RuntimeError("the gateway did not start")
        yield url
    finally:
        process.terminate()
        process.wait(60)


def add_key(dsn: str, tenant: str) -> str:
    """A new data key without limits."""
    from tidegate.api.control import NewKey, make_key
    from tidegate.stores.settings import StoreSettings
    from tidegate.stores.systems.postgres import Postgres

    key, record = make_key(NewKey(tenant=tenant, role="data", name="", requests_per_minute=0, tokens_per_minute=0))

    async def add() -> None:
        store = Postgres(StoreSettings(dsn=dsn))
        await store.add_key(record)
        await store.close()

    asyncio.run(add())
    return key


def ban(folder: Path, count: int) -> Path:
    """A file of that many terms that no answer here holds: made-up words of Latin letters and of Chinese characters, always the same."""
    draw = random.Random(7)
    letters, signs = "abcdefghijklmnopqrstuvwxyz", [chr(code) for code in range(0x4E00, 0x5E00)]
    terms: set[str] = set()
    while len(terms) < count:
        terms.add("".join(draw.choices(letters if draw.random() < 0.8 else signs, k=draw.randint(5, 12))))
    file = folder / "terms.txt"
    file.write_text("\n".join(sorted(terms)) + "\n", encoding="utf-8")
    return file


def write_config(folder: Path, dsn: str, engine_url: str, *, limits: bool = True, terms: Path | None = None, workers: int = 1) -> Path:
    """Settings of a gateway with all on that users have on: key check, limits, flight record, metrics, spool and its drain, a ban of terms."""
    folder.mkdir(exist_ok=True)
    config = folder / "bench.toml"
    limit = "[limits]\nrequests_per_minute = 100000000\ntokens_per_minute = 2000000000\n" if limits else ""
    guard = f'[guard]\nterms_file = "{terms}"\n' if terms is not None else ""
    config.write_text(
        f'[server]\nworkers = {workers}\n'
        f'[store]\ndsn = "{dsn}"\n[local]\ndata = "{folder / "data"}"\nembedder = false\n[log]\nflights = "errors"\n{limit}{guard}'
        f'[engines.mock]\nadapter = "openai"\nurl = "{engine_url}"\nmodels = ["mock"]\n'
        'conformance = "off"\n'  # the engines of the benchmarks do not do as they are told
    )
    return config


def start(argv: list[str], **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, *argv], **options)


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    model = next((line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "python": platform.python_version(), "load_1m": round(os.getloadavg()[0], 2)}


def commit() -> str:
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def least_us(call: Callable[[], object], calls: int, rounds: int, clock_ns: Callable[[], int] = time.perf_counter_ns) -> float:
    """Microseconds of one call: the least of some rounds, so that what else the machine did is left out."""
    best = float("inf")
    for _ in range(rounds):
        began_ns = clock_ns()
        for _ in range(calls):
            call()
        best = min(best, (clock_ns() - began_ns) / calls / 1e3)
    return round(best, 2)


def record(name: str, body: dict[str, Any]) -> Path:
    """Write a dated result file."""
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{name}.json"
    file.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), "commit": commit(), "machine": machine(), **body}, indent=1) + "\n")
    return file
