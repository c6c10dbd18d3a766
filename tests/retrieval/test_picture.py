"""Pictures of pages: the passage stands where its boxes say, and a hostile file costs only its own request."""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import io
import signal
import zlib
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pypdfium2
import pypdfium2.raw as pdfium
import pytest
from PIL import Image
from reportlab.pdfgen.canvas import Canvas

from tidegate.core.document import Box, PagePicture, StoredPassage
from tidegate.core.errors import Busy, DocumentUnreadable, NotFound
from tidegate.retrieval import picture, picture_child
from tidegate.retrieval.loaded import Bounds
from tidegate.retrieval.loaders import pdf
from tidegate.retrieval.picture import Pictures

PDFS = Path(__file__).parents[3] / "shared" / "data" / "pdf"
BENEFITS = Path(__file__).parents[2] / "examples" / "documents" / "benefit-table.pdf"


class Files:
    """FileStore in a dict; counts what is read. `held`: nothing is read before it is set."""

    def __init__(self, *files: bytes) -> None:
        self.kept = {hashlib.sha256(file).hexdigest(): file for file in files}
        self.read = 0
        self.held: asyncio.Event | None = None
        self.asked = asyncio.Event()

    async def stored_passages(self, collection: str, ids: Sequence[str]) -> list[StoredPassage]:
        return []

    async def read_file(self, sha256: str) -> bytes | None:
        self.read += 1
        self.asked.set()
        if self.held is not None:
            await self.held.wait()
        return self.kept.get(sha256)


async def draw(file: bytes, number: int = 1) -> PagePicture:
    return await Pictures(Files(file)).page(hashlib.sha256(file).hexdigest(), number)


def at_once(file: bytes, number: int = 1) -> PagePicture:
    """As the child draws it, here: for files that are known to be harmless."""
    drawn = picture_child.draw(file, number).picture
    assert drawn is not None
    return drawn


def pixels(drawn: PagePicture) -> Any:
    """Grey values, shape (height, width)."""
    return np.asarray(Image.open(io.BytesIO(drawn.png)).convert("L"))


def raw_pdf(*contents: bytes, page: bytes = b"") -> bytes:
    """A PDF of one page; `contents`: the page's stream, then those of forms /F1, /F2, ..., each of which may draw the others."""
    forms = b" ".join(b"/F%d %d 0 R" % (n, 4 + n) for n in range(1, len(contents)))
    names = b"/Resources << /XObject << %s >> >>" % forms
    bodies = [
        b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 200 200] /Contents 4 0 R %s %s >>" % (names, page),
    ]
    for n, content in enumerate(contents):
        form = b"/Type /XObject /Subtype /Form /BBox [0 0 200 200] " + names if n else b""
        bodies.append(b"<< %s /Length %d >>\nstream\n%s\nendstream" % (form, len(content), content))
    file, places = b"%PDF-1.7\n", []
    for n, body in enumerate(bodies, 1):
        places.append(len(file))
        file += b"%d 0 obj\n%s\nendobj\n" % (n, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    end = b"xref\n0 %d\n0000000000 65535 f \n%strailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n"
    return file + end % (len(bodies) + 1, table, len(bodies) + 1, len(file))


def one_line(tmp_path: Path, rotation: int, crop: tuple[float, float, float, float], aside: bool) -> bytes:
    """A page of 500 by 400 points with one line of text on it."""
    path = tmp_path / "line.pdf"
    canvas = Canvas(str(path), pagesize=(500, 400), invariant=1)
    if aside:
        canvas.translate(280, 120)
        canvas.rotate(90)
        canvas.drawString(0, 0, "The excess is 250 euros.")
    else:
        canvas.drawString(120, 220, "The excess is 250 euros.")
    canvas.save()
    with closing(pypdfium2.PdfDocument(str(path))) as document:
        page = document[0]
        page.set_cropbox(*crop)
        page.set_rotation(rotation)
        out = io.BytesIO()
        document.save(out)
    return out.getvalue()


def text_under(file: bytes, box: Box) -> str:
    """What PDFium itself finds where it shows this part of the page, by its own way from a picture to the file."""
    with closing(pypdfium2.PdfDocument(file)) as document, closing(document[box.page - 1]) as page, closing(page.get_textpage()) as text:
        width, height = page.get_size()
        corners = []
        for x, y in ((box.x0, box.top), (box.x1, box.bottom)):
            to_x, to_y = ctypes.c_double(), ctypes.c_double()
            # In hundredths of a point: the way takes whole pixels.
            size = (round(width * 100), round(height * 100))
            pdfium.FPDF_DeviceToPage(page.raw, 0, 0, *size, 0, round(x * 100), round(y * 100), to_x, to_y)
            corners.append((to_x.value, to_y.value))
        (x0, y0), (x1, y1) = corners
        return str(text.get_text_bounded(min(x0, x1) - 1, min(y0, y1) - 1, max(x0, x1) + 1, max(y0, y1) + 1)).strip()


# -- the passage stands where its boxes say


@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
@pytest.mark.parametrize("aside", [False, True], ids=["upright", "aside"])
@pytest.mark.parametrize("crop", [(0, 0, 500, 400), (60, 50, 470, 390), (-30, -20, 480, 600), (700, 700, 900, 900)], ids=[
    "whole", "cropped", "crop box beyond the page", "crop box elsewhere",
])
def test_the_box_lies_on_the_passage(tmp_path: Path, rotation: int, aside: bool, crop: tuple[float, float, float, float]) -> None:
    """Whatever a page's rotation and crop box, and whichever way its text runs: all ink of the picture is in the box that the loader found,
    and it fills the box."""
    file = one_line(tmp_path, rotation, crop, aside)
    (tmp_path / "a.pdf").write_bytes(file)
    (block,) = pdf.load(str(tmp_path / "a.pdf"), Bounds()).blocks
    (box,) = block.boxes
    drawn = at_once(file)
    grey = pixels(drawn)
    scale = grey.shape[1] / drawn.width
    assert scale == pytest.approx(grey.shape[0] / drawn.height, rel=0.01)
    down, across = np.nonzero(grey < 128)
    assert box.x0 - 1 <= across.min() / scale <= box.x0 + 5
    assert box.x1 - 5 <= across.max() / scale <= box.x1 + 1
    assert box.top - 1 <= down.min() / scale <= box.top + 5
    assert box.bottom - 5 <= down.max() / scale <= box.bottom + 1
    if crop[0] != 700:  # there PDFium shows no page at all, and knows no way
        assert text_under(file, box) == block.text


def test_each_row_of_a_table_is_under_its_box() -> None:
    """The example's tables: the text that PDFium finds under each box is that of its row."""
    file = BENEFITS.read_bytes()
    tables = [block for block in pdf.load(str(BENEFITS), Bounds()).blocks if block.kind == "table"]
    assert len(tables) == 2
    for table in tables:
        header, _, *rows = table.text.split("\n")
        for row, box in zip([header, *rows], table.boxes, strict=True):
            assert text_under(file, box).split() == row.replace("|", " ").split()


def test_a_picture_is_bounded() -> None:
    """A wall of a page has no more pixels than a sheet, a stamp no fewer than one; the sizes in points are the page's own."""
    for size in ((14_000, 14_000), (14_400, 3), (0.2, 0.2)):
        out = io.BytesIO()
        canvas = Canvas(out, pagesize=size, invariant=1)
        canvas.showPage()
        canvas.save()
        drawn = at_once(out.getvalue())
        assert (drawn.width, drawn.height) == pytest.approx(size, abs=0.01)
        assert 1 <= max(pixels(drawn).shape) <= picture.MOST_PIXELS
        assert min(pixels(drawn).shape) >= 1


# -- what cannot be shown


async def test_pages_and_files_that_are_not_there_are_refused() -> None:
    """By name, however large or small the number."""
    file = BENEFITS.read_bytes()
    for number in (0, -1, 3, 10**30):
        with pytest.raises(NotFound, match=f"There is no page {number}: the document has 2"):
            await draw(file, number)
    with pytest.raises(NotFound, match="The file is no longer there"):
        await Pictures(Files()).page("0" * 64, 1)


@pytest.mark.parametrize(("file", "said"), [
    (b"", "cannot be drawn"), (b"%PDF-1.7\n" + b"\0" * 1000, "cannot be drawn"), (zlib.compress(b"x" * 10**6), "cannot be drawn"),
], ids=["empty", "no pages", "no PDF"])
async def test_a_broken_file_is_told(file: bytes, said: str) -> None:
    """And the next one is drawn."""
    with pytest.raises(DocumentUnreadable, match=said):
        await draw(file)


async def test_an_encrypted_file_is_told(tmp_path: Path) -> None:
    """That it opens only with a password."""
    path = tmp_path / "closed.pdf"
    canvas = Canvas(str(path), encrypt="secret")
    canvas.drawString(100, 100, "Closed")
    canvas.save()
    with pytest.raises(DocumentUnreadable, match="encrypted and opens only with a password"):
        await draw(path.read_bytes())


async def test_a_page_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forms that draw forms, ten times each, twelve deep: the process is killed, and the next request is served.
    It had no settings in its environment."""
    started = []
    start = asyncio.create_subprocess_exec
    monkeypatch.setenv("TIDEGATE_STORE__DSN", "postgres://u:secret@db/main")

    async def note(*command: str, **options: Any) -> Any:
        assert "TIDEGATE_STORE__DSN" not in options["env"]
        started.append(await start(*command, **options))
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", note)
    monkeypatch.setattr(picture, "DRAW_S", 1.0)
    endless = raw_pdf(*(b"/F%d Do " % (n + 1) * 10 for n in range(12)), b"0 0 9 9 re f")
    files = Files(endless, BENEFITS.read_bytes())
    never, good = files.kept
    pictures = Pictures(files)
    with pytest.raises(DocumentUnreadable, match="takes longer than 1 s"):
        await pictures.page(never, 1)
    monkeypatch.setattr(picture, "DRAW_S", 60.0)
    assert (await pictures.page(good, 1)).png
    assert [child.returncode for child in started] == [-signal.SIGKILL, 0]


async def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may have less than it needs says so, or ends."""
    monkeypatch.setattr(picture, "MEMORY_BYTES", 64 << 20)
    with pytest.raises(DocumentUnreadable):
        await draw(BENEFITS.read_bytes())


@pytest.mark.skipif(not PDFS.is_dir(), reason="the real-world files are not here (../shared/data/pdf)")
async def test_real_files_are_drawn_or_refused() -> None:
    """Encrypted and broken ones: a picture, or a sentence."""
    drawn = refused = 0
    for path in sorted(path for folder in ("encrypted", "broken") for path in (PDFS / folder).glob("*.pdf"))[::3]:
        try:
            drawn += pixels(await draw(path.read_bytes())).size > 0
        except DocumentUnreadable as error:
            refused += error.message.endswith(".") and bool(error.hint)
    assert drawn + refused >= 8
    assert min(drawn, refused) >= 2


# -- one at a time


async def test_a_page_that_was_drawn_is_kept() -> None:
    """Whoever looks again, or at the same time, costs nothing more; the pages that were not looked at for longest go first."""
    file = BENEFITS.read_bytes()
    files = Files(file)
    pictures = Pictures(files)
    (sha256,) = files.kept
    first, second = await asyncio.gather(pictures.page(sha256, 1), pictures.page(sha256, 1))
    assert first is second
    assert files.read == 1


async def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for less than two pages: the second pushes the first out."""
    files = Files(BENEFITS.read_bytes())
    pictures = Pictures(files)
    (sha256,) = files.kept
    monkeypatch.setattr(picture, "KEPT_BYTES", len((await pictures.page(sha256, 1)).png) + 100)
    for number in (2, 2, 1):
        await pictures.page(sha256, number)
    assert files.read == 3


async def test_too_many_wait_for_no_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is drawn, as many wait as may, the next is told to come back; and so is one who waited for too long."""
    files = Files(BENEFITS.read_bytes())
    files.held = asyncio.Event()
    pictures = Pictures(files)
    (sha256,) = files.kept
    first = asyncio.create_task(pictures.page(sha256, 1))
    await files.asked.wait()
    monkeypatch.setattr(picture, "MOST_WAITING", 1)
    monkeypatch.setattr(picture, "WAIT_S", 0.01)
    second = asyncio.create_task(pictures.page(sha256, 2))
    await asyncio.sleep(0)
    with pytest.raises(Busy, match="Other pages are being drawn") as caught:
        await pictures.page(sha256, 2)
    assert caught.value.retry_after_s
    with pytest.raises(Busy):
        await second
    files.held.set()
    assert (await first).png
    assert (await pictures.page(sha256, 2)).png
