"""How fast PDFs are read and how much memory that takes: 200 pages on one core, in a process as the product has it.

    .venv/bin/python benchmarks/loaders.py [FOLDER]

Two documents are made: with a table on every tenth page, and with one on every page; every second table is ruled, the others are not. A page of
text has about 3,000 characters. FOLDER may hold further PDFs, which are read too. Each document is read three times, each time in a fresh process
that is bound to one core: pages a second without the start of the interpreter (median), and the process's largest resident memory (the largest of
the three), which holds the interpreter and all loaders. Writes benchmarks/results/loaders.json.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import record

PAGES, ROUNDS = 200, 3

CHILD = """
import json, os, resource, sys, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from tidegate.retrieval.load_child import by_suffix, read
from tidegate.retrieval.loaded import Bounds
loaders = by_suffix()
began = time.perf_counter()
loaded = read(loaders, sys.argv[1], Bounds()).loaded
seconds = time.perf_counter() - began
tables = sum(block.kind == "table" for block in loaded.blocks)
pages = max(box.page for block in loaded.blocks for box in block.boxes)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"seconds": seconds, "pages": pages, "tables": tables, "peak_mb": peak}))
"""


def make(file: Path, every: int) -> None:
    """A document with a table on each page whose number is a multiple of `every`."""
    from reportlab.lib.pagesizes import A4
    from reportlab.pdfgen.canvas import Canvas

    draw = random.Random(7)
    words = ["the", "policy", "covers", "damage", "by", "water", "that", "comes", "out", "of", "pipes", "inside", "and", "we", "pay", "within"]
    canvas = Canvas(str(file), pagesize=A4, invariant=1)
    for number in range(1, PAGES + 1):
        y = 790.0
        if number % every == 0:
            y = table(canvas, draw, y, ruled=number // every % 2 == 0)
        canvas.setFont("Helvetica", 10)
        while y > 60:
            line = ""
            while len(line) < 85:
                line += draw.choice(words) + " "
            ends = draw.random() < 0.15
            canvas.drawString(50, y, line.strip().capitalize() + "." if ends else line)
            y -= 24 if ends else 13
        canvas.drawString(290, 30, str(number))
        canvas.showPage()
    canvas.save()


def table(canvas: Any, draw: random.Random, top: float, *, ruled: bool) -> float:
    """Twenty rows of five columns; returns where it ends."""
    canvas.setFont("Helvetica", 9)
    for row in range(20):
        y = top - 16 * row
        if ruled:
            canvas.grid([50, 210, 290, 370, 450, 530], [y + 11, y - 5])
        name = "Item of the statement" if row == 0 else f"Position number {draw.randrange(1000)}"
        canvas.drawString(54, y, name)
        for col in range(4):
            canvas.drawRightString(284 + 80 * col, y, str(2023 + col) if row == 0 else f"{draw.randrange(10**6):,}")
    return top - 16 * 20 - 20


def measured(file: Path) -> dict[str, Any]:
    runs = [
        json.loads(subprocess.run([sys.executable, "-c", CHILD, str(file)], capture_output=True, text=True, check=True).stdout)
        for _ in range(ROUNDS)
    ]
    pages = runs[0]["pages"]
    return {
        "pages": pages, "tables": runs[0]["tables"], "pages_per_s": round(pages / statistics.median(run["seconds"] for run in runs), 1),
        "peak_mb": round(max(run["peak_mb"] for run in runs), 1),
    }  # fmt: skip


def main() -> None:
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        made = {"a table on every tenth page": 10, "a table on every page": 1}
        for name, every in made.items():
            file = Path(folder) / f"{every}.pdf"
            make(file, every)
            results[name] = measured(file)
            print(name, results[name], flush=True)
    for file in sorted(Path(sys.argv[1]).rglob("*.pdf")) if len(sys.argv) > 1 else []:
        results[file.name] = measured(file)
        print(file.name, results[file.name], flush=True)
    record("loaders", {"cores_used": 1, "rounds": ROUNDS, "documents": results})


if __name__ == "__main__":
    main()
