"""What the gateway adds to an engine, beside nginx and a bare uvloop relay in the same run.

    .venv/bin/python benchmarks/relay.py [--rounds 5] [--tools ../shared/tools/relay]

Needs gcc and nginx. The method and its tools are described in that folder's README; core 0 runs the system under test, core 1 the engine and
the driver. Everything is on 127.0.0.1, bounded in count and time. Prints the gates and writes benchmarks/results/relay.json.
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

from common import ROOT, database, record, write_config

PLAN = "max/0,1/1,16,64/1.2/0;paced/1/1,16,64/1.6/0;fast/1/16/1.6/0;max/0/16/1.2/200000"
TOKENS = 128 - 16  # tokens more in a `fast` stream than in a `paced` one


def median(rows: list[dict[str, Any]], system: str, profile: str, stream: int, conc: int, name: str, pad: int = 0) -> float:
    found = [
        row[name] for row in rows
        if (row["sys"], row["prof"], row.get("stream"), row.get("conc"), row["pad"]) == (system, profile, stream, conc, pad)
        and row.get(name) is not None
    ]
    return statistics.median(found)


def gates(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The issue's figures: CPU per request, extra CPU per stream event, added TTFT against the bare relay."""

    def added_ttft_us(system: str) -> float:
        return median(rows, system, "paced", 1, 16, "ttft_p50") - median(rows, "direct", "paced", 1, 16, "ttft_p50")

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
            "added_ttft_p50_us": round(added_ttft_us(system)),
            "requests_per_s_c16": median(rows, system, "max", 0, 16, "rps"),
            "cpu_us_per_request_200kB": median(rows, system, "max", 0, 16, "cpu_us_req", 200000),
            "rss_mb": median(rows, system, "max", 0, 64, "rss_mb"),
        }
        for system in ("nginx", "raw_uvloop", "tidegate")
    }
    ours, bare = figures["tidegate"], figures["raw_uvloop"]
    bad = sum(row.get(kind, 0) for row in rows if row["sys"] == "tidegate" for kind in ("err", "non200", "badtok", "nodone"))
    return {
        "figures": figures,
        "gates": {
            "cpu_us_per_request <= 110": ours["cpu_us_per_request"] <= 110,
            "cpu_us_per_event <= 25": ours["cpu_us_per_event"] <= 25,
            "added_ttft <= 1.5x bare relay": ours["added_ttft_p50_us"] <= 1.5 * bare["added_ttft_p50_us"],
            "all streams whole": bad == 0,
        },
        "added_ttft_ratio_to_bare_relay": round(ours["added_ttft_p50_us"] / bare["added_ttft_p50_us"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", type=Path, default=ROOT.parent / "shared" / "tools" / "relay")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plan", default=PLAN)
    options = parser.parse_args()
    for needed in ("gcc", "nginx", "taskset"):
        if shutil.which(needed) is None:
            sys.exit(f"{needed} is not installed (Debian: apt-get install gcc nginx util-linux)")
    with database() as (home, dsn, key):
        work = home / "relay"
        shutil.copytree(options.tools, work, copy_function=shutil.copyfile)
        for name in ("mock", "drive"):
            subprocess.run(["gcc", "-O2", "-w", "-o", name, f"{name}.c"], cwd=work, check=True)
        config = write_config(home, dsn, "http://127.0.0.1:9100")
        systems = {
            "direct": {"port": 9100},
            "nginx": {"cmd": "nginx -p {B} -c nginx.conf", "port": 4110},
            "raw_uvloop": {"cmd": f"{sys.executable} raw_proxy.py 4111", "port": 4111},
            "tidegate": {
                "cmd": f"{sys.executable} -m tidegate.cli serve --config {config} --port 4120", "port": 4120, "model": "mock",
                "headers": [f"Authorization: Bearer {key}"],
            },
        }
        (work / "systems.json").write_text(json.dumps(systems))
        rows: list[dict[str, Any]] = []
        for number in range(options.rounds):
            out = work / f"out{number}.jsonl"
            subprocess.run([sys.executable, "run_plan.py", str(out), "--warm", ".4", "--plan", options.plan], cwd=work, check=True)
            rows += [{**json.loads(line), "round": number} for line in out.read_text().splitlines()]
        merged = work / "all.jsonl"
        merged.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(subprocess.run([sys.executable, "table.py", str(merged)], cwd=work, check=True, capture_output=True, text=True).stdout)
    result = gates(rows)
    print(json.dumps(result, indent=1))
    print("written:", record("relay", {"rounds": options.rounds, "plan": options.plan, **result}))


if __name__ == "__main__":
    main()
