"""A hostile file costs only its own job: time, memory and crashes of the reading process."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests import waiting

from tidegate.core.document import Box
from tidegate.core.errors import DocumentUnreadable
from tidegate.retrieval import load_child
from tidegate.retrieval.load import Loader
from tidegate.retrieval.loaded import Block, Bounds, Loaded

PDFS = Path(__file__).parents[3] / "shared" / "data" / "pdf"


@pytest.fixture
async def loader() -> AsyncIterator[Loader]:
    async with Loader() as loader:
        yield loader


@pytest.fixture
def good(tmp_path: Path) -> str:
    path = tmp_path / "good.md"
    path.write_text("# Claims\n\nReport a loss within 14 days.\n")
    return str(path)


def pid(loader: Loader) -> int:
    assert loader._child is not None
    return loader._child.pid


async def test_one_process_reads_many_files(loader: Loader, good: str) -> None:
    """The reading process is started once, not for every file."""
    first = await loader.load(good)
    before = pid(loader)
    assert (await loader.load(good), pid(loader)) == (first, before)
    assert first.title == "Claims"


async def test_a_refused_file_does_not_cost_the_process(loader: Loader, good: str, tmp_path: Path) -> None:
    """A file that is merely wrong is refused with its reason, and the process goes on."""
    await loader.load(good)
    before = pid(loader)
    jpeg = tmp_path / "photo.pdf"
    jpeg.write_bytes(b"\xff\xd8\xff\xe0 picture")
    with pytest.raises(DocumentUnreadable, match="JPEG"):
        await loader.load(str(jpeg))
    assert pid(loader) == before


async def test_a_file_that_takes_too_long_is_stopped(good: str, tmp_path: Path) -> None:
    """A reader that hangs (here: at a pipe that nobody writes to) is killed after its time, and the next file is read."""
    os.mkfifo(tmp_path / "hang.txt")
    async with Loader(Bounds(seconds=2.0)) as loader:
        await loader.load(good)
        before = pid(loader)
        with pytest.raises(DocumentUnreadable, match="longer than 2 s"):
            await loader.load(str(tmp_path / "hang.txt"))
        with pytest.raises(ProcessLookupError):
            os.kill(before, 0)
        assert (await loader.load(good)).title == "Claims"


async def test_a_reader_that_somebody_kills_reads_again(good: str) -> None:
    """kill -9 from outside is not the file's fault: another process reads it."""
    async with Loader() as loader:
        first = await loader.load(good)
        os.kill(pid(loader), signal.SIGKILL)
        assert await loader.load(good) == first


async def test_a_file_whose_readers_are_killed_twice_is_refused(good: str, tmp_path: Path) -> None:
    """It may be what the system ran out of memory for. Here both wait at a pipe that nobody writes to."""
    os.mkfifo(tmp_path / "pipe.txt")
    async with Loader() as loader:
        await loader.load(good)
        killed = pid(loader)
        reading = asyncio.create_task(loader.load(str(tmp_path / "pipe.txt")))
        os.kill(killed, signal.SIGKILL)
        await waiting.until(lambda: loader._child is not None and pid(loader) != killed)
        os.kill(pid(loader), signal.SIGKILL)
        with pytest.raises(DocumentUnreadable, match="SIGKILL"):
            await reading
        assert (await loader.load(good)).title == "Claims"


async def test_a_file_that_takes_too_much_memory_is_refused(good: str, tmp_path: Path) -> None:
    """A file whose parse outgrows the limit is refused with the limit's name, and the next file is read."""
    big = tmp_path / "big.md"
    big.write_text("| a | b |\n|---|---|\n" + "| 1 | 2 |\n" * 400_000)
    async with Loader(Bounds(memory_bytes=256 << 20)) as loader:
        with pytest.raises(DocumentUnreadable, match="more than 256 MiB"):
            await loader.load(str(big))
        assert loader._child is None  # a process that ran out of memory is not used again
        assert (await loader.load(good)).title == "Claims"


@pytest.mark.parametrize(("signal_number", "said"), [(signal.SIGSEGV, "crash .SIGSEGV."), (signal.SIGABRT, "of memory")])
async def test_a_crash_costs_one_file(good: str, tmp_path: Path, signal_number: int, said: str) -> None:
    """A reader that dies from native code's fault gives an error for its file; an abort is how native code runs out of memory."""
    os.mkfifo(tmp_path / "hang.txt")
    async with Loader() as loader:
        job = asyncio.create_task(loader.load(str(tmp_path / "hang.txt")))
        while loader._child is None:  # noqa: ASYNC110 - a process that starts sets no event
            await asyncio.sleep(0.01)
        os.kill(pid(loader), signal_number)
        with pytest.raises(DocumentUnreadable, match=said):
            await job
        assert (await loader.load(good)).title == "Claims"


async def outcome(loader: Loader, file: Path) -> str:
    """"blocks", or the reason why there are none."""
    try:
        return "blocks" if (await loader.load(str(file))).blocks else ""
    except DocumentUnreadable as error:
        return error.message


@pytest.mark.skipif(not PDFS.is_dir(), reason="the real-world files are not here (../shared/data/pdf)")
async def test_every_real_file_leaves_the_parent_and_its_reader_well(loader: Loader, good: str, tmp_path: Path) -> None:
    """Encrypted, broken, scanned, hostile, and each of them renamed: blocks or a reason, and at the end a good file is read as ever."""
    files = sorted(PDFS.glob("*/*.pdf"))
    small = [file for file in files if file.stat().st_size < 100_000]
    renamed = [tmp_path / f"{at}{suffix}" for at, suffix in enumerate([".docx", ".xlsx", ".html", ".csv", ".txt", ".md"])]
    for file, target in zip(small[:: len(small) // 6], renamed, strict=False):
        shutil.copy(file, target)
    said = [await outcome(loader, file) for file in [*files, *(target for target in renamed if target.exists())]]
    assert all(said)
    assert 0 < said.count("blocks") < len(files)
    assert (await loader.load(good)).title == "Claims"


async def test_cancelling_stops_the_reader(tmp_path: Path) -> None:
    """Ctrl-C in mid-file leaves no process behind."""
    os.mkfifo(tmp_path / "hang.txt")
    async with Loader() as loader:
        job = asyncio.create_task(loader.load(str(tmp_path / "hang.txt")))
        while loader._child is None:  # noqa: ASYNC110 - a process that starts sets no event
            await asyncio.sleep(0.01)
        child = pid(loader)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


def test_a_broken_character_costs_itself_alone() -> None:
    """Half a surrogate pair in a text, a title or a tag can be sent to the parent after all; a whole pair stays."""
    loaded = Loaded("a\ud800b", [Block("x\udc00 \U0001f600", boxes=[Box(1, 0, 0, 1, 1)])], {"k\udfff": "v"})
    outcome = load_child.read({".py": lambda path, bounds: loaded}, __file__, Bounds())
    assert outcome.loaded is not None
    assert (outcome.loaded.title, outcome.loaded.blocks[0].text) == ("a\ufffdb", "x\ufffd \U0001f600")
    assert outcome.loaded.blocks[0].boxes == [Box(1, 0, 0, 1, 1)]
    assert "U+FFFD" in outcome.loaded.notes[-1]
    assert msgspec.msgpack.encode(outcome)
