"""Pages of kept files as pictures, each drawn in a process of its own, so that a hostile file costs only its own request."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections import OrderedDict

import msgspec

from tidegate.core.document import PagePicture
from tidegate.core.errors import Busy, DocumentUnreadable, NotFound
from tidegate.core.ports import FileStore

#: What can be drawn, and up to which size it is kept for that: one statement brings it to the database, whose time is bounded (64 MiB took 4 s).
SUFFIXES, MOST_BYTES = (".pdf",), 32 << 20
#: Seconds that drawing one page may take, and that a request waits for its turn.
DRAW_S, WAIT_S = 10.0, 15.0
#: Address space of a process that draws.
MEMORY_BYTES = 1 << 30
#: The longer side of a picture in pixels, and pixels for a point, at most.
MOST_PIXELS, MOST_SCALE = 1600, 2.0
#: Requests that wait for their turn; more are refused at once.
MOST_WAITING = 16
#: Bytes of pictures that are kept for those who look again: some fifty pages of text.
KEPT_BYTES = 16 << 20


class Outcome(msgspec.Struct, omit_defaults=True):
    """The picture, or why there is none. `missing`: there is no such page."""

    picture: PagePicture | None = None
    message: str = ""
    missing: bool = False


class Pictures:
    """Draws one page at a time, and keeps the last ones. For one event loop."""

    def __init__(self, files: FileStore) -> None:
        self._files = files
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._kept: OrderedDict[tuple[str, int], PagePicture] = OrderedDict()

    async def page(self, file_sha256: str, number: int) -> PagePicture:
        """A page of the file, counted from 1. Raises NotFound where the file or the page is not there, DocumentUnreadable for what cannot be
        drawn, or not within its bounds, Busy where others wait already, StoreDown."""
        key = (file_sha256, number)
        if (found := self._recall(key)) is not None:
            return found
        await self._take_turn()
        try:
            if (found := self._recall(key)) is not None:  # whoever was before us wanted the same
                return found
            file = await self._files.read_file(file_sha256)
            if file is None:
                raise NotFound("The file is no longer there.", hint="Its document was replaced or removed.")
            picture = await _draw(file, number)
        finally:
            self._turn.release()
        self._keep(key, picture)
        return picture

    async def _take_turn(self) -> None:
        if self._waiting >= MOST_WAITING:
            raise _busy()
        self._waiting += 1
        try:
            async with asyncio.timeout(WAIT_S):
                await self._turn.acquire()
        except TimeoutError:
            raise _busy() from None
        finally:
            self._waiting -= 1

    def _recall(self, key: tuple[str, int]) -> PagePicture | None:
        if (found := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
        return found

    def _keep(self, key: tuple[str, int], picture: PagePicture) -> None:
        self._kept[key] = picture
        size = sum(len(one.png) for one in self._kept.values())
        while size > KEPT_BYTES:
            _, gone = self._kept.popitem(last=False)
            size -= len(gone.png)


async def _draw(file: bytes, number: int) -> PagePicture:
    command = (sys.executable, "-m", "tidegate.retrieval.picture_child", str(number), str(MEMORY_BYTES))
    # Settings may hold passwords: they are nothing that a process with somebody's file in it should have.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
    child = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environment)
    try:
        async with asyncio.timeout(DRAW_S):
            said, _ = await child.communicate(file)
    except TimeoutError:
        raise DocumentUnreadable(f"Drawing page {number} takes longer than {DRAW_S:g} s.", hint="Look at the document itself.") from None
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode == 0 and said:
        outcome = msgspec.msgpack.decode(said, type=Outcome)
        if outcome.picture is not None:
            return outcome.picture
        raise (NotFound if outcome.missing else DocumentUnreadable)(outcome.message, hint="Look at the document itself.")
    code = child.returncode or 0
    # Native code that runs out of memory aborts instead of raising.
    why = f"takes more than {MEMORY_BYTES >> 20} MiB of memory" if code == -signal.SIGABRT else f"made its process end ({_ended(code)})"
    raise DocumentUnreadable(f"Drawing page {number} {why}.", hint="The file may be damaged. Look at the document itself.")


def _ended(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"code {code}"


def _busy() -> Busy:
    return Busy("Other pages are being drawn.", hint="Look again in a moment.", retry_after_s=2)
