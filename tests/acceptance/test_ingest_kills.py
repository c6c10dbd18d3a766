"""An ingest whose parts are killed at random, and again to the end: each document once, whole, the old version or the new one.

Longer, as a command: INGEST_KILLS=40 INGEST_DOCUMENTS=5000 .venv/bin/python -m pytest tests/acceptance/test_ingest_kills.py
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from reportlab.pdfgen.canvas import Canvas
from tests import waiting

pytestmark = [pytest.mark.local, pytest.mark.slow, pytest.mark.timeout(1200)]

DOCUMENTS = int(os.environ.get("INGEST_DOCUMENTS", "1000"))
KILLS = int(os.environ.get("INGEST_KILLS", "8"))
VICTIMS = ("ingest", "loader", "embedder", "postgres")
TIDEGATE = [sys.executable, "-m", "tidegate.cli"]


def write_documents(folder: Path, edition: str) -> None:
    """Short ones of four kinds; each passage says which document and edition it is of. The second edition has a passage more."""
    for number in range(DOCUMENTS):
        says = f"Rule {number} edition {edition}"
        parts = [f"{says} part {part}" for part in range(1 if edition == "one" else 2)]
        if number % 100 == 3:
            canvas = Canvas(str(folder / f"{number:05}.pdf"), invariant=1)
            for part in parts:
                canvas.drawString(72, 700, part)
                canvas.showPage()
            canvas.save()
        elif number % 4 == 0:
            body = "".join(f"<h2>{part}</h2><p>{part}</p>" for part in parts)
            (folder / f"{number:05}.html").write_text(f"<html><body>{body}</body></html>")
        elif number % 4 == 1:
            (folder / f"{number:05}.csv").write_text("name,text\n" + "\n".join(f"{part},x" for part in parts))
        else:
            (folder / f"{number:05}.md").write_text("\n\n".join(f"## {part}\n\n{part}" for part in parts))


class Up:
    """A running `tidegate up` without an engine: it supervises database and embedder."""

    def __init__(self, home: Path) -> None:
        self.data = home / "data"
        self.log = home / "up.log"
        without = ["--set", "local.engine=false"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*TIDEGATE, "up", "--data", str(self.data), "--port", "0", *without], stdout=log, stderr=log, cwd=home, start_new_session=True
            )
        waiting.until_blocking(lambda: "curl" in self.log.read_text() or self.process.poll() is not None, "start", 240)
        assert self.process.poll() is None, self.log.read_text()
        self.dsn = json.loads((self.data / "run" / "parts.json").read_bytes())["dsn"]

    def pid(self, part: str) -> int | None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            pid = int(json.loads((self.data / "run" / f"{part}.pid").read_bytes())["pid"])
            if Path(f"/proc/{pid}").exists():
                return pid
        return None

    def ingest(self, folder: Path) -> subprocess.Popen[bytes]:
        options = ["--collection", "rules", "--base", str(folder), "--set", f"local.data={self.data}", "--workers", "2"]
        return subprocess.Popen(
            [*TIDEGATE, "ingest", str(folder), *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder, start_new_session=True
        )


@pytest.fixture(scope="module")
def up(data_home: Path) -> Iterator[Up]:
    home = data_home / "ik"
    home.mkdir(mode=0o711)
    running = Up(home)
    yield running
    running.process.send_signal(signal.SIGTERM)
    running.process.wait(60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    write_documents(folder, "one")
    return folder


def loaders_of(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


#: One row for each document: its version, how many passages it has, how many of them are of the second edition, and how many are another's.
STATE = """
select d.source, d.version, count(p.id), count(p.id) filter (where p.text like '%%edition two%%'),
       count(p.id) filter (where p.text not like '%%Rule ' || (regexp_replace(d.source, '[.].*', ''))::int || ' edition%%')
from tidegate.documents as d left join tidegate.passages as p on p.document_id = d.id and p.collection = d.collection
where d.collection = 'rules' group by d.id
"""


def check_state(rows: list[tuple[str, int, int, int, int]]) -> None:
    """Each document is whole, its own and stored once: one passage of the first edition, or two of the second."""
    assert len({row[0] for row in rows}) == len(rows)
    wrong = [row for row in rows if row[4] or (row[2], row[3]) not in ((1, 0), (2, 2), (1, 1))]
    assert not wrong, f"neither old nor new: {wrong[:5]}"
    twice = [row for row in rows if row[1] > (1 if row[3] == 0 else 2)]
    assert not twice, f"stored more than once: {twice[:5]}"


class Reader(threading.Thread):
    """Looks all the time at all documents, as a search may; down times are the database's."""

    def __init__(self, dsn: str) -> None:
        super().__init__(daemon=True)
        self.dsn, self.stop, self.looks, self.error = dsn, threading.Event(), 0, ""

    def run(self) -> None:
        while not self.stop.wait(0.1):
            with contextlib.suppress(psycopg.OperationalError), psycopg.connect(self.dsn, connect_timeout=2) as link:
                rows = link.execute(STATE).fetchall()
                try:
                    check_state(rows)
                    assert len(rows) == DOCUMENTS
                except AssertionError as error:
                    self.error = self.error or str(error)
                self.looks += 1


def to_the_end(up: Up, folder: Path) -> str:
    """The ingest again, until nothing ends it early; what it said then."""
    for _ in range(3):
        running = up.ingest(folder)
        said = running.communicate(timeout=900)[0].decode()
        if running.returncode == 0:
            return said
        waiting.until_blocking(lambda: up.pid("postgres") and up.pid("embedder"), "restart", 120)
    raise AssertionError(said)


def test_killed_anywhere_and_again_every_document_is_there_once(up: Up, folder: Path) -> None:
    """Ingest, reader, embedder and database are killed (-9) at random; a reader sees whole documents all the time, and at the end all are new."""
    assert f"{DOCUMENTS} stored" in to_the_end(up, folder)
    write_documents(folder, "two")
    chance = random.Random(815)
    reader = Reader(up.dsn)
    reader.start()
    victims = [VICTIMS[number % len(VICTIMS)] for number in range(KILLS)]
    chance.shuffle(victims)
    running = up.ingest(folder)
    for victim in victims:
        time.sleep(chance.uniform(0.3, 1.5))  # when it happens is the chance that is tested
        if running.poll() is not None:  # killed, or it lost patience, or it is done
            running.communicate()
            running = up.ingest(folder)
            waiting.until_blocking(lambda now=running: loaders_of(now.pid) or now.poll() is not None, "reading", 120)
        pids = {"ingest": [running.pid], "loader": loaders_of(running.pid)[:1]}.get(victim) or [up.pid(victim) or 0]
        for pid in filter(None, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    running.communicate(timeout=900)
    to_the_end(up, folder)
    assert "0 stored (0 passages)" in to_the_end(up, folder)
    reader.stop.set()
    reader.join()
    assert (reader.error, reader.looks > 0) == ("", True)
    with psycopg.connect(up.dsn) as link:
        rows = link.execute(STATE).fetchall()
        check_state(rows)
        assert len(rows) == DOCUMENTS
        assert all(row[3] == row[2] for row in rows), "an old passage is left"
        ((passages, worded, counted),) = link.execute(
            "select (select count(*) from tidegate.passages where collection = 'rules'),"
            " (select count(distinct q.posting >> 24) from tidegate.postings as q join tidegate.passages as p"
            "  on p.number = q.posting >> 24 and p.collection = 'rules'),"
            " (select worded from tidegate.collections where name = 'rules')"
        ).fetchall()
        assert passages == sum(row[2] for row in rows) == worded == counted
        ((orphans,),) = link.execute(
            "select count(*) from tidegate.postings where not exists (select from tidegate.passages where number = posting >> 24)"
        ).fetchall()
        assert orphans == 0


def test_ctrl_c_ends_cleanly(up: Up, folder: Path) -> None:
    """A sentence instead of a traceback, and no reader is left behind. Until then both stand behind others."""
    write_documents(folder, "three")  # as the second: other bytes for every document
    running = up.ingest(folder)
    waiting.until_blocking(lambda: loaders_of(running.pid), "reading", 120)
    loaders = loaders_of(running.pid)
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    assert [os.getpriority(os.PRIO_PROCESS, pid) for pid in (running.pid, loaders[0])] == [min(19, ours + 5)] * 2
    running.send_signal(signal.SIGINT)
    said = running.communicate(timeout=60)[0].decode()
    assert running.returncode == 130
    assert "stopped: the documents that are stored stay" in said
    assert "Traceback" not in said
    waiting.until_blocking(lambda: not any(Path(f"/proc/{pid}").exists() for pid in loaders), "the end of the readers")
