"""How well tables are found in PDFs: adjacency relations on the documents of ICDAR 2013 that have a published truth.

    .venv/bin/python benchmarks/tables.py FOLDER

FOLDER holds NAME.pdf with NAME-str.xml. The measure is that of Göbel, Hassan, Oro and Orsi ("A methodology for evaluating algorithms for table
understanding in PDF documents", DocEng 2012; used at ICDAR 2013): every cell that is not blank is related to its nearest such neighbour to the
right and below; a relation counts as found where both texts and the direction agree. Texts are compared without white space, NFKC, case
folded. The whole process is measured: where a table is missed its relations are missed, where one is invented its relations are wrong. Relations
are counted page by page; precision, recall and F1 are given per file, over all relations (micro) and as the mean of the files (macro).
Writes benchmarks/results/tables.json.
"""

from __future__ import annotations

import re
import sys
import time
import unicodedata
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common import record

from tidegate.retrieval.loaded import Bounds
from tidegate.retrieval.loaders import pdf
from tidegate.retrieval.tables import Cell

Relations = Counter[tuple[str, str, str]]


def relations(cells: Iterable[Cell]) -> Relations:
    texts = [cell for cell in cells if normal(cell.text)]
    grid = {
        (row, col): at for at, cell in enumerate(texts)
        for row in range(cell.row, cell.row + cell.rows) for col in range(cell.col, cell.col + cell.cols)
    }  # fmt: skip
    rows, cols = (max((place[axis] for place in grid), default=0) for axis in (0, 1))
    pairs = set()
    for (row, col), at in grid.items():
        right = next((grid[row, other] for other in range(col + 1, cols + 1) if (row, other) in grid), at)
        below = next((grid[other, col] for other in range(row + 1, rows + 1) if (other, col) in grid), at)
        pairs.update((at, to, way) for to, way in ((right, "right"), (below, "below")) if to != at)
    return Counter((normal(texts[one].text), normal(texts[other].text), way) for one, other, way in pairs)


def normal(text: str) -> str:
    return re.sub(r"\s+", "", unicodedata.normalize("NFKC", text)).casefold()


def truth(file: Path) -> dict[int, Relations]:
    by_page: dict[int, Relations] = defaultdict(Counter)
    for region in ElementTree.parse(file).getroot().iter("region"):
        cells = []
        for cell in region.iter("cell"):
            row, col = int(cell.get("start-row", 0)), int(cell.get("start-col", 0))
            rows, cols = int(cell.get("end-row", row)) - row + 1, int(cell.get("end-col", col)) - col + 1
            cells.append(Cell(cell.findtext("content") or "", row, col, rows, cols))
        by_page[int(region.get("page", 0))] += relations(cells)
    return by_page


def found(file: Path) -> dict[int, Relations]:
    by_page: dict[int, Relations] = defaultdict(Counter)
    for page in pdf.pages_of(str(file), Bounds()):
        for item in page.items:
            if item.table:
                by_page[page.number] += relations(item.table.cells)
    return by_page


def figures(right: int, said: int, true: int) -> dict[str, Any]:
    precision, recall = right / max(1, said), right / max(1, true)
    f1 = 2 * precision * recall / (precision + recall) if right else 0.0
    return {"precision": round(precision, 4), "recall": round(recall, 4), "f1": round(f1, 4), "right": right, "found": said, "true": true}


def measure(folder: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Any], float]:
    """Figures of each file, of all relations, and the mean of the files' F1."""
    files, total = {}, Counter[str]()
    for file in sorted(folder.glob("*.pdf")):
        wanted, got = truth(file.with_name(f"{file.stem}-str.xml")), found(file)
        right = sum((wanted[page] & got[page]).total() for page in {*wanted, *got})
        said, true = (sum(map(Counter.total, side.values())) for side in (got, wanted))
        files[file.name] = figures(right, said, true)
        total.update(right=right, found=said, true=true)
    macro = sum(one["f1"] for one in files.values()) / len(files)
    return files, figures(total["right"], total["found"], total["true"]), round(macro, 4)


def main() -> None:
    began_ns = time.perf_counter_ns()
    files, micro, macro = measure(Path(sys.argv[1]))
    seconds = round((time.perf_counter_ns() - began_ns) / 1e9, 2)
    for name, of_file in files.items():
        print(f"{name}: {of_file}")
    print(f"all: {micro}, mean of the files' F1 {macro}, {seconds} s")
    record("tables", {"set": "ICDAR 2013, those with a published truth", "micro": micro, "macro_f1": macro, "seconds": seconds, "files": files})


if __name__ == "__main__":
    main()
