"""What the gateway adds to an engine, beside nginx and a bare uvloop relay in the same run.

    .venv/bin/python benchmarks/relay.py [--rounds 5] [--tools ../shared/tools/relay] [--only one|two]

Needs gcc and nginx. The method and its tools are described in that folder's README. Everything is on 127.0.0.1, bounded in count and time.

`tidegate` bans 100,000 terms, `tidegate_plain` bans none: a token that may be the beginning of a term waits for the next one, which is no work
but shows as time to the first token.

- `one`: one worker; core 0 runs the system under test, core 1 the engine and the driver. Writes benchmarks/results/relay.json.
- `two`: two workers on the two cores that engine and driver use too; nginx with two workers beside it. Writes benchmarks/results/relay_two.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import ROOT, ban, database, record, write_config

ONE = "max/0/1,16,64/1.2/0;paced/1/1,16,64/1.6/0;fast/1/16/1.6/0;max/0/16/1.2/200000"
TWO = "max/0/64/2/0;p100/1/64/4/0;tok/1/64/2/0;max64/1/64/2/0"
TOKENS = 128 - 16  # tokens more in a `fast` stream than in a `paced` one
TERMS = 100_000

Rows = list[dict[str, Any]]


def median(rows: Rows, system: str, profile: str, stream: int, conc: int, name: str, pad: int = 0, *, needed: bool = True) -> float:
    """0 where nothing was measured and nothing is `needed`."""
    found = [
        row[name] for row in rows
        if (row["sys"], row["prof"], row.get("stream"), row.get("conc"), row["pad"]) == (system, profile, stream, conc, pad)
        and row.get(name) is not None
    ]
    return statistics.median(found) if found or needed else 0.0


def added(rows: Rows, system: str, profile: str, conc: int, name: str) -> float:
    """Microseconds that a system adds to what the engine alone takes."""
    return round(median(rows, system, profile, 1, conc, name) - median(rows, "direct", profile, 1, conc, name))


def bad(rows: Rows) -> int:
    """Streams and answers of ours that were not whole."""
    return sum(row.get(kind, 0) for row in rows if row["sys"].startswith("tidegate") for kind in ("err", "non200", "badtok", "nodone"))


def one(rows: Rows) -> dict[str, Any]:
    """CPU per request, extra CPU per stream event, added TTFT against the bare relay."""

    def event_us(system: str) -> float:
        by_round: dict[str, dict[int, float]] = {"fast": {}, "paced": {}}
        for row in rows:
            if (row["sys"], row.get("stream"), row.get("conc")) == (system, 1, 16) and row["prof"] in by_round:
                by_round[row["prof"]][row["round"]] = row["cpu_us_req"]
        return statistics.median((by_round["fast"][n] - by_round["paced"][n]) / TOKENS for n in by_round["fast"] if n in by_round["paced"])

    figures = {
        system: {
            "cpu_us_per_request": median(rows, system, "max", 0, 16, "cpu_us_req"),
            "cpu_us_per_event": round(event_us(system), 1),
            "added_ttft_p50_us": added(rows, system, "paced", 16, "ttft_p50"),
            "added_ttft_p50_us_64_streams": added(rows, system, "paced", 64, "ttft_p50"),
            "added_ttft_p50_us_alone": added(rows, system, "paced", 1, "ttft_p50"),
            "requests_per_s_c16": median(rows, system, "max", 0, 16, "rps"),
            "cpu_us_per_request_200kB": median(rows, system, "max", 0, 16, "cpu_us_req", 200000),
            "rss_mb": median(rows, system, "max", 0, 64, "rss_mb"),
        }
        for system in ("nginx", "raw_uvloop", "tidegate", "tidegate_plain")
    }
    ours, bare, plain, nginx = figures["tidegate"], figures["raw_uvloop"], figures["tidegate_plain"], figures["nginx"]
    return {
        "figures": figures,
        "gates": {
            "cpu_us_per_request <= 75": ours["cpu_us_per_request"] <= 75,
            "cpu_us_per_event <= 20": ours["cpu_us_per_event"] <= 20,
            "cpu_us_per_request_200kB <= 450": ours["cpu_us_per_request_200kB"] <= 450,
            "all streams whole": bad(rows) == 0,
        },
        "added_ttft_ratio_to_bare_relay_without_ban": round(plain["added_ttft_p50_us"] / bare["added_ttft_p50_us"], 2),
        "cpu_per_request_ratio_to_nginx": round(ours["cpu_us_per_request"] / nginx["cpu_us_per_request"], 2),
        "cpu_per_request_ratio_to_bare_relay": round(ours["cpu_us_per_request"] / bare["cpu_us_per_request"], 2),
    }


def two(rows: Rows) -> dict[str, Any]:
    """What two workers do on two cores that they share with engine and driver."""
    figures = {
        system: {
            "added_ttft_p50_us": added(rows, system, "p100", 64, "ttft_p50"),
            "added_ttft_p99_us": added(rows, system, "p100", 64, "ttft_p99"),
            "requests_per_s_c64": median(rows, system, "max", 0, 64, "rps"),
            "tokens_per_s_one_by_one": round(64 * median(rows, system, "tok", 1, 64, "rps")),
            # the driver keeps no more samples than it has room for: what is quicker than that has no figure here
            "tokens_per_s_in_bursts": round(64 * bursts) if (bursts := median(rows, system, "max64", 1, 64, "rps", needed=False)) else None,
        }
        for system in ("nginx", "tidegate_plain")
    }
    nginx, ours = figures["nginx"], figures["tidegate_plain"]
    return {
        "figures": figures,
        "gates": {
            "added TTFT P50 <= 5x nginx's": ours["added_ttft_p50_us"] <= 5 * nginx["added_ttft_p50_us"],
            "added TTFT P99 <= nginx's + 2 ms": ours["added_ttft_p99_us"] <= nginx["added_ttft_p99_us"] + 2000,
            "requests/s >= 0.20 of nginx's": ours["requests_per_s_c64"] >= 0.2 * nginx["requests_per_s_c64"],
            "tokens/s one by one >= 20,000": ours["tokens_per_s_one_by_one"] >= 20_000,
            "tokens/s in bursts >= 80,000": ours["tokens_per_s_in_bursts"] >= 80_000,
            "all streams whole": bad(rows) == 0,
        },
    }


def run(home: Path, dsn: str, key: str, tools: Path, *, workers: int, rounds: int, plan: str) -> Rows:
    """All systems in turn, `rounds` times."""
    work = home / f"relay{workers}"
    shutil.copytree(tools, work, copy_function=shutil.copyfile)
    for name in ("mock", "drive"):
        subprocess.run(["gcc", "-O2", "-w", "-o", name, f"{name}.c"], cwd=work, check=True)
    nginx = work / "nginx.conf"
    nginx.write_text(nginx.read_text().replace("worker_processes 1", f"worker_processes {workers}"))
    configs = {
        "tidegate": write_config(home / "ban", dsn, "http://127.0.0.1:9100", terms=ban(home, TERMS), workers=workers),
        "tidegate_plain": write_config(home / "plain", dsn, "http://127.0.0.1:9100", workers=workers),
    }
    systems: dict[str, dict[str, Any]] = {
        "direct": {"port": 9100},
        "nginx": {"cmd": "nginx -p {B} -c nginx.conf", "port": 4110},
        "raw_uvloop": {"cmd": f"{sys.executable} raw_proxy.py 4111", "port": 4111},
        **{
            name: {
                "cmd": f"{sys.executable} -m tidegate.cli serve --config {config} --port {port}", "port": port, "model": "mock",
                "headers": [f"Authorization: Bearer {key}"],
            }
            for port, (name, config) in enumerate(configs.items(), 4120)
        },
    }
    if workers > 1:
        del systems["raw_uvloop"], systems["tidegate"]  # the one knows one process only, and the ban is measured with one
    (work / "systems.json").write_text(json.dumps(systems))
    rows: Rows = []
    for number in range(rounds):
        out = work / f"out{number}.jsonl"
        argv = [sys.executable, "run_plan.py", str(out), "--warm", ".4", "--plan", plan, *(["--nopin"] if workers > 1 else [])]
        subprocess.run(argv, cwd=work, check=True)
        rows += [{**json.loads(line), "round": number} for line in out.read_text().splitlines()]
    merged = work / "all.jsonl"
    merged.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(subprocess.run([sys.executable, "table.py", str(merged)], cwd=work, check=True, capture_output=True, text=True).stdout)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", type=Path, default=ROOT.parent / "shared" / "tools" / "relay")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("one", "two"))
    options = parser.parse_args()
    for needed in ("gcc", "nginx", "taskset"):
        if shutil.which(needed) is None:
            sys.exit(f"{needed} is not installed (Debian: apt-get install gcc nginx util-linux)")
    with database() as (home, dsn, key):
        for name, workers, plan, judge in (("relay", 1, ONE, one), ("relay_two", 2, TWO, two)):
            if options.only in (None, "one" if workers == 1 else "two"):
                rows = run(home, dsn, key, options.tools, workers=workers, rounds=options.rounds, plan=plan)
                result = judge(rows)
                print(json.dumps(result, indent=1))
                print("written:", record(name, {"rounds": options.rounds, "plan": plan, "terms": TERMS, **result}))


if __name__ == "__main__":
    main()
