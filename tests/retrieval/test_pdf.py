"""What the PDF loader makes of good, odd, broken and hostile files."""

from __future__ import annotations

import itertools
import re
import shutil
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pypdfium2
import pytest
from reportlab.lib.pagesizes import A4
from reportlab.pdfgen.canvas import Canvas
from reportlab.platypus import SimpleDocTemplate, Table, TableStyle

from tidegate.core.document import Box
from tidegate.core.errors import DocumentUnreadable
from tidegate.retrieval.load_child import by_suffix, read
from tidegate.retrieval.loaded import Block, Bounds, Loaded
from tidegate.retrieval.loaders import pdf
from tidegate.retrieval.pdf_text import Frame

DATA = Path(__file__).parents[3] / "shared" / "data"
ROOT = Path(__file__).parents[2]

needs_data = pytest.mark.skipif(not (DATA / "pdf").is_dir(), reason="the real-world files are not here (../shared/data/pdf)")


def make_pdf(path: Path, pages: list[list[tuple[float, float, float, str]]], **options: str) -> str:
    """Lines as (x, y from the bottom, size, text) on A4 pages."""
    canvas = Canvas(str(path), pagesize=A4, invariant=1, **options)
    for lines in pages:
        for x, y, size, text in lines:
            canvas.setFont("Helvetica", size)
            canvas.drawString(x, y, text)
        canvas.showPage()
    canvas.save()
    return str(path)


def test_a_ruled_table_keeps_rows_header_and_page() -> None:
    """The example PDF: both tables, each with its header row and its page."""
    loaded = pdf.load(str(ROOT / "examples" / "documents" / "benefit-table.pdf"), Bounds())
    tables = [block for block in loaded.blocks if block.kind == "table"]
    assert [table.page for table in tables] == [1, 2]
    assert tables[0].text.startswith("| Benefit | Bronze | Silver | Gold |\n|---|---|---|---|\n| Annual limit | 5,000 euros |")
    assert "| 50 to 64 | 28.40 euros | 55.10 euros | 98.60 euros |" in tables[1].text
    assert not [block for block in loaded.blocks if block.kind != "table" and "98.60" in block.text]
    headings = [block.text for block in loaded.blocks if block.kind == "heading" and block.level == 2]
    assert headings == ["What the plans pay", "What the plans cost"]


def test_a_merged_cell_counts_for_every_place_it_covers(tmp_path: Path) -> None:
    """A cell over two columns and a cell over two rows are repeated, so that each row stands for itself."""
    path = tmp_path / "merged.pdf"
    spans = [("GRID", (0, 0), (-1, -1), 1, "black"), ("SPAN", (1, 0), (2, 0)), ("SPAN", (0, 1), (0, 2))]
    rows = [["Plan", "Limits", ""], ["Gold", "dental", "2400"], ["", "glasses", "320"]]
    SimpleDocTemplate(str(path)).build([Table(rows, style=TableStyle(spans))])
    (table,) = pdf.load(str(path), Bounds()).blocks
    assert table.text == "| Plan | Limits | Limits |\n|---|---|---|\n| Gold | dental | 2400 |\n| Gold | glasses | 320 |"


def test_columns_are_read_one_after_the_other(tmp_path: Path) -> None:
    """Two columns under a title across both are read title, left, right, though the file draws right, left, title."""
    left = [(50.0, 700.0 - 14 * n, 10.0, f"left line {n} of the text") for n in range(6)]
    right = [(320.0, 700.0 - 14 * n, 10.0, f"right line {n} of the text") for n in range(6)]
    path = make_pdf(tmp_path / "columns.pdf", [[*right, *left, (50.0, 760.0, 20.0, "A title that goes across both of the columns")]])
    text = " ".join(block.text for block in pdf.load(path, Bounds()).blocks)
    positions = [text.index(words) for words in ("title", "left line 0", "left line 5", "right line 0", "right line 5")]
    assert positions == sorted(positions)


def test_running_headers_are_left_out_and_noted(tmp_path: Path) -> None:
    """A header on every page is no text of the document; a note says that it was left out."""
    pages = [[(50.0, 820.0, 9.0, f"Harbour Mutual, page {n}"), (50.0, 600.0, 11.0, f"Text of page {n}.")] for n in range(1, 5)]
    loaded = pdf.load(make_pdf(tmp_path / "running.pdf", pages), Bounds())
    assert [(block.text, block.page) for block in loaded.blocks] == [(f"Text of page {n}.", n) for n in range(1, 5)]
    assert "Harbour Mutual, page #" in loaded.notes[0]


def test_an_empty_page_is_noted(tmp_path: Path) -> None:
    """A page without text is not skipped in silence."""
    loaded = pdf.load(make_pdf(tmp_path / "gap.pdf", [[(50.0, 600.0, 11.0, "Some text.")], []]), Bounds())
    assert loaded.notes == ["Page 2 is empty."]


def test_too_many_pages_are_refused(tmp_path: Path) -> None:
    """A file over the bound is refused with the bound, never read in part."""
    path = make_pdf(tmp_path / "long.pdf", [[(50.0, 600.0, 11.0, "text")]] * 3)
    with pytest.raises(DocumentUnreadable, match="3 pages, more than 2"):
        pdf.load(path, Bounds(max_pages=2))


def test_an_encrypted_file_says_so(tmp_path: Path) -> None:
    """A password is asked for by name."""
    path = make_pdf(tmp_path / "secret.pdf", [[(50.0, 600.0, 11.0, "text")]], encrypt="geheim")
    with pytest.raises(DocumentUnreadable, match="encrypted"):
        pdf.load(path, Bounds())


@needs_data
@pytest.mark.parametrize("path", sorted((DATA / "pdf" / "encrypted").glob("*user-password.pdf")), ids=lambda path: path.name)
def test_real_encrypted_files_say_so(path: Path) -> None:
    """Every generation of PDF encryption is recognised."""
    with pytest.raises(DocumentUnreadable, match="encrypted"):
        pdf.load(str(path), Bounds())


@needs_data
@pytest.mark.parametrize("path", sorted((DATA / "pdf" / "broken").glob("*.pdf")), ids=lambda path: path.name)
def test_real_broken_files_are_read_or_refused(path: Path) -> None:
    """A broken file gives what can still be read, or a reason."""
    outcome = read(by_suffix(), str(path), Bounds())
    assert outcome.loaded or (outcome.failure == "unreadable" and outcome.message)


@needs_data
@pytest.mark.parametrize("path", sorted((DATA / "pdf" / "scan").glob("*.pdf")), ids=lambda path: path.name)
def test_real_scans_are_refused_with_the_way_out(path: Path) -> None:
    """A scan without text is refused, and OCR is named."""
    with pytest.raises(DocumentUnreadable, match="a scan") as caught:
        pdf.load(str(path), Bounds())
    assert "ocrmypdf" in (caught.value.hint or "")


@needs_data
def test_a_real_three_column_page_is_read_in_order() -> None:
    """The Federal Register: no sentence is torn by the next column, by footnotes or by what runs up the margin, and titles are those in bold."""
    loaded = pdf.load(str(DATA / "pdf" / "en_layout" / "federal-register-2020-17221.pdf"), Bounds())
    texts = [block.text for block in loaded.blocks]
    text = " ".join(texts)
    assert "final corrective action is necessary to address the unsafe condition" in text
    assert "The FAA is proposing this AD to address the unsafe condition on these products." in text
    assert "stall warning activation, airspeed disagree alert, and altitude disagree alert,5 and may affect the flightcrew’s ability" in text
    assert "the Ethiopian Civil Aviation Authority (ECAA)" in text
    assert "DSKJLSW" not in text
    titles = [block.text for block in loaded.blocks if block.kind == "heading" and block.page and block.page <= 3]
    assert titles == [
        "Proposed Rules Federal Register", "DEPARTMENT OF TRANSPORTATION", "Federal Aviation Administration", "14 CFR Part 39",
        "Airworthiness Directives; The Boeing Company Airplanes", "Examining the AD Docket", "Comments Invited",
        "Confidential Business Information (CBI)", "Background", "Proposed Design Changes",
    ]  # fmt: skip


@needs_data
def test_a_real_two_column_page_with_footnotes_is_read_in_order() -> None:
    """A paper: marks of footnotes part no line, words with a hyphen keep it, the stamp in the margin is one text of its own."""
    loaded = pdf.load(str(DATA / "pdf" / "en_layout" / "multi-column-2p.pdf"), Bounds())
    texts = [block.text for block in loaded.blocks]
    assert "arXiv:2004.04906v3 [cs.CL] 30 Sep 2020" in texts
    text = " ".join(texts)
    assert "is often observed in practice2, indicating the needs of improving retrieval." in text
    assert "outperform TF-IDF/BM25 for open-domain QA before ORQA" in text


@needs_data
def test_a_real_chinese_report_keeps_its_tables() -> None:
    """A figure of a Chinese quarterly report stands in a table beside its row's name."""
    loaded = pdf.load(str(DATA / "pdf" / "zh_finance" / "issue-67-example.pdf"), Bounds())
    rows = [row for block in loaded.blocks if block.kind == "table" for row in block.text.split("\n")]
    assert "| 营业收入（元） | 4,755,785.11 | 5,699,227.63 | -16.55% |" in rows
    # A cell of four lines, with a figure in one of them that stands half a point lower than the text.
    start = "| 非流动资产处置损益（包括已计提资产减值准备的冲销部分） | 3,240,868.82 | 清偿债务减少预计负债，计入营业外收入 3,340,324.88 元"
    assert any(row.startswith(start) for row in rows)


# -- where things stand


def test_every_block_knows_its_place(tmp_path: Path) -> None:
    """Boxes are points from the top left corner of the page: a line drawn 100 points below the top stands there."""
    loaded = pdf.load(make_pdf(tmp_path / "a.pdf", [[(72.0, A4[1] - 100, 10.0, "Text that stands here.")]]), Bounds())
    (box,) = loaded.blocks[0].boxes
    assert (box.page, box.x0) == (1, 72.0)
    assert box.top < 100 < box.bottom
    assert box.bottom - box.top == pytest.approx(11.5, abs=1.5)


@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
@pytest.mark.parametrize("aside", [False, True], ids=["upright", "aside"])
@pytest.mark.parametrize("crop", [(0, 0, 500, 500), (20, 30, 480, 490), (50, 60, 450, 440)], ids=["whole", "crop", "smaller"])
def test_places_are_those_of_the_page_as_it_is_shown(tmp_path: Path, rotation: int, aside: bool, crop: tuple[int, int, int, int]) -> None:
    """Whatever a page's rotation, media and crop box, and whichever way its text runs: the table is read upright, and a box lies around its
    words on the page as a viewer shows it."""
    path = tmp_path / "a.pdf"
    canvas = Canvas(str(path), pagesize=(500, 500), invariant=1)
    if aside:
        canvas.translate(500, 0)
        canvas.rotate(90)
    for at in range(5):
        canvas.line(100, 400 - 20 * at, 300, 400 - 20 * at)
    for x in (100, 200, 300):
        canvas.line(x, 400, x, 320)
    for row, col in itertools.product(range(4), range(2)):
        canvas.drawString(110 + 100 * col, 386 - 20 * row, f"c{row}{col}")
    canvas.save()
    document = pypdfium2.PdfDocument(str(path))
    page = document[0]
    page.set_mediabox(*(crop if crop[0] == 20 else (0, 0, 500, 500)))
    page.set_cropbox(*crop)
    page.set_rotation(rotation)
    document.save(str(path))
    (block,) = pdf.load(str(path), Bounds()).blocks
    assert block.text == "| c00 | c01 |\n|---|---|\n| c10 | c11 |\n| c20 | c21 |\n| c30 | c31 |"
    # The first row from (100, 380) to (300, 400), turned with its text, then cut out, then turned with its page.
    x0, y0, x1, y1 = (500 - 400, 100, 500 - 380, 300) if aside else (100, 380, 300, 400)
    left, bottom, right, top = crop
    shown = {
        0: (x0 - left, top - y1, x1 - left, top - y0), 90: (y0 - bottom, x0 - left, y1 - bottom, x1 - left),
        180: (right - x1, y0 - bottom, right - x0, y1 - bottom), 270: (top - y1, right - x1, top - y0, right - x0),
    }  # fmt: skip
    assert block.boxes[0][1:] == pytest.approx(shown[rotation], abs=1)


def test_what_lies_outside_the_page_is_not_read(tmp_path: Path) -> None:
    """Text that a crop box hides is no text of the page."""
    canvas = Canvas(str(tmp_path / "a.pdf"), pagesize=(400, 400), invariant=1)
    canvas.setCropBox((50, 20, 390, 380))
    canvas.drawString(60, 300, "On the page")
    canvas.drawString(5, 390, "outside")
    canvas.save()
    assert [block.text for block in pdf.load(str(tmp_path / "a.pdf"), Bounds()).blocks] == ["On the page"]


# -- pages that belong together


def grid_pdf(path: Path, rows: Sequence[Sequence[str]], repeat: int) -> str:
    style = TableStyle([("GRID", (0, 0), (-1, -1), 1, "black")])
    SimpleDocTemplate(str(path), pagesize=A4).build([Table(rows, style=style, repeatRows=repeat)])
    return str(path)


@pytest.mark.parametrize("repeat", [0, 1])
def test_a_table_over_pages_is_one_table(tmp_path: Path, repeat: int) -> None:
    """With its header repeated on each page or not, a long table is one block, and each row knows its page."""
    rows = [["Age", "Bronze", "Gold"], *([str(n), f"{n}.50", f"{2 * n}.50"] for n in range(100))]
    loaded = pdf.load(grid_pdf(tmp_path / "long.pdf", rows, repeat), Bounds())
    (table,) = loaded.blocks
    assert table.text.split("\n")[2:] == [f"| {n} | {n}.50 | {2 * n}.50 |" for n in range(100)]
    assert len(table.boxes) == 101
    pages = [box.page for box in table.boxes]
    assert pages == sorted(pages)
    assert set(pages) == {1, 2, 3}


def test_a_sentence_goes_on_overleaf(tmp_path: Path) -> None:
    """A paragraph that a page breaks off is one block with a box on either page."""
    first = "This sentence is long enough to be a paragraph of running text and does not"
    pages = [[(50.0, 400.0, 11.0, first)], [(50.0, 700.0, 11.0, "end on the page it began on.")], [(50.0, 700.0, 11.0, "Another one.")]]
    blocks = pdf.load(make_pdf(tmp_path / "over.pdf", pages), Bounds()).blocks
    assert [block.text for block in blocks] == [f"{first} end on the page it began on.", "Another one."]
    assert [box.page for box in blocks[0].boxes] == [1, 2]


def test_a_title_of_broken_characters_costs_the_title_only(tmp_path: Path) -> None:
    """Half of a surrogate pair in what the file says of itself: the document is read, under its own name."""
    path = Path(make_pdf(tmp_path / "named.pdf", [[(50.0, 600.0, 11.0, "Some text.")]]))
    document = path.read_bytes()
    assert b"/Title (untitled)" in document
    path.write_bytes(document.replace(b"/Title (untitled)", b"/Title <feffd835>"))
    loaded = pdf.load(str(path), Bounds())
    assert (loaded.title, [block.text for block in loaded.blocks]) == ("named", ["Some text."])


def test_a_sentence_goes_on_behind_footnotes(tmp_path: Path) -> None:
    """What stands in smaller print at the foot of a page is not read into the sentence that goes on overleaf."""
    first = "This sentence is long enough to be a paragraph of running text and does not"
    note = "The first footnote is long enough to be a paragraph of its own and has no end"
    pages = [[(50.0, 700.0, 11.0, first), (50.0, 100.0, 7.0, note)], [(50.0, 700.0, 11.0, "end on the page it began on."), (50.0, 680.0, 11.0, "So")]]
    blocks = pdf.load(make_pdf(tmp_path / "foot.pdf", pages), Bounds()).blocks
    assert [block.text for block in blocks] == [f"{first} end on the page it began on. So", note]
    assert [box.page for box in blocks[0].boxes] == [1, 2]


def test_a_chapter_may_have_its_own_running_header(tmp_path: Path) -> None:
    """In a long document a line in the margin of six pages runs, however small a share of the pages that is."""
    pages = [[(50.0, 820.0, 9.0, "Chapter one" if n < 6 else f"Own {'abcdefghijklmnopqrst'[n]}"), (50.0, 600.0, 11.0, "Text.")] for n in range(20)]
    blocks = pdf.load(make_pdf(tmp_path / "chapters.pdf", [*pages, *[[(50.0, 600.0, 11.0, "Text.")]] * 10]), Bounds()).blocks
    assert sum(block.text == "Chapter one" for block in blocks) == 0
    assert sum(block.text.startswith("Own") for block in blocks) == 14


@pytest.mark.parametrize("scaled", ["named", "by the text's matrix", "by the page's matrix"])
def test_headings_go_by_the_size_that_people_see(tmp_path: Path, scaled: str) -> None:
    """A file may set every font in size 1 and stretch it: larger print is still a heading, with the level of its size."""
    path = tmp_path / "sizes.pdf"
    canvas = Canvas(str(path), pagesize=A4, invariant=1)
    for at, (size, text) in enumerate([(20, "Motor cover"), (14, "What we pay"), *[(10, f"Line {n} of the text, without end.") for n in range(6)]]):
        canvas.saveState()
        if scaled == "by the page's matrix":
            canvas.translate(50, 700 - 30 * at)
            canvas.scale(size, size)
        canvas.setFont("Helvetica", size if scaled == "named" else 1)
        words = canvas.beginText()
        if scaled == "by the text's matrix":
            words.setTextTransform(size, 0, 0, size, 50, 700 - 30 * at)
        elif scaled == "named":
            words.setTextOrigin(50, 700 - 30 * at)
        words.textOut(text)
        canvas.drawText(words)
        canvas.restoreState()
    canvas.save()
    blocks = pdf.load(str(path), Bounds()).blocks
    assert [(block.text, block.level) for block in blocks if block.kind == "heading"] == [("Motor cover", 1), ("What we pay", 2)]


def test_a_stamp_in_the_margin_is_not_read_into_the_text(tmp_path: Path) -> None:
    """Short words that run up the page beside the text are one text of their own, behind the page's."""
    path = tmp_path / "stamp.pdf"
    canvas = Canvas(str(path), pagesize=A4, invariant=1)
    canvas.setFont("Helvetica", 11)
    for at in range(10):
        canvas.drawString(72, 700 - 14 * at, f"line {at} of a text that goes on to its end")
    canvas.rotate(90)
    canvas.setFont("Helvetica", 20)
    canvas.drawString(560, -40, "v3 of 30 Sep 2020")
    canvas.save()
    texts = [block.text for block in pdf.load(str(path), Bounds()).blocks]
    assert texts == [" ".join(f"line {at} of a text that goes on to its end" for at in range(10)), "v3 of 30 Sep 2020"]


def test_a_footnotes_mark_parts_no_line(tmp_path: Path) -> None:
    """Small figures that stand higher than their line belong to it, and the line's size stays what it is."""
    lines = [(50.0, 700.0, 11.0, "Damage by water"), (130.8, 704.5, 6.0, "1"), (134.5, 700.0, 11.0, ", where pipes burst, is covered."),
             (50.0, 686.0, 11.0, "So is damage by fire."), (50.0, 650.0, 7.0, "and a note in small print")]  # fmt: skip
    blocks = pdf.load(make_pdf(tmp_path / "mark.pdf", [lines]), Bounds()).blocks
    assert blocks[0].text == "Damage by water1, where pipes burst, is covered. So is damage by fire."
    assert len(blocks) == 2


def test_each_item_of_a_list_is_a_text_of_its_own(tmp_path: Path) -> None:
    """Items with bullets do not run into each other; an item's second line stays with it."""
    lines = ["We cover:", "• damage by water,", "• damage by fire that", "   begins in the house,", "• theft."]
    path = make_pdf(tmp_path / "list.pdf", [[(50.0, 700.0 - 14 * at, 11.0, line) for at, line in enumerate(lines)]])
    assert [block.text for block in pdf.load(path, Bounds()).blocks] == [
        "We cover:", "• damage by water,", "• damage by fire that begins in the house,", "• theft.",
    ]  # fmt: skip


def test_page_numbers_are_left_out_wherever_they_stand(tmp_path: Path) -> None:
    """A page's number right below a short page's text is no text of the document either."""
    pages = [[(50.0, 700.0, 11.0, f"Text number {n} of this page."), (280.0, 650.0, 9.0, f"Page {n} of 4")] for n in range(1, 5)]
    loaded = pdf.load(make_pdf(tmp_path / "numbers.pdf", pages), Bounds())
    assert [block.text for block in loaded.blocks] == [f"Text number {n} of this page." for n in range(1, 5)]


def test_cover_and_contents_are_told_from_the_text(tmp_path: Path) -> None:
    """The cover is marked; the table of contents is marked, and a note says that it makes no passages."""
    cover = [(150.0, 500.0, 28.0, "Household policy"), (150.0, 440.0, 11.0, "Edition 2026")]
    entries = [(50.0, 680.0 - 20 * n, 11.0, f"{title} {'.' * 30} {n + 3}") for n, title in enumerate(["Cover", "Claims", "Limits", "Complaints"])]
    text = [(50.0, 700.0, 11.0, "We pay for damage by water that comes out of pipes inside of the house."), (50.0, 686.0, 11.0, "And by fire.")]
    path = make_pdf(tmp_path / "book.pdf", [cover, [(50.0, 720.0, 16.0, "Contents"), *entries], text, text])
    loaded = pdf.load(path, Bounds())
    assert [(block.page, block.part) for block in loaded.blocks[:2]] == [(1, "cover"), (1, "cover")]
    assert {block.part for block in loaded.blocks if block.page == 2} == {"contents"}
    assert {block.part for block in loaded.blocks if block.page and block.page > 2} == {"body"}
    assert loaded.notes == ["A table of contents on page 2 makes no passages."]


def test_bold_lines_are_headings(tmp_path: Path) -> None:
    """Where few lines are bold, one that stands alone names what follows, in print of the same size."""
    path = tmp_path / "bold.pdf"
    canvas = Canvas(str(path), pagesize=A4, invariant=1)
    for at, (font, text) in enumerate([("Helvetica-Bold", "Claims"), *[("Helvetica", f"Line {n} of the text.") for n in range(8)]]):
        canvas.setFont(font, 11)
        canvas.drawString(50, 700 - 14 * at, text)
    canvas.save()
    assert [(block.kind, block.text[:12]) for block in pdf.load(str(path), Bounds()).blocks] == [("heading", "Claims"), ("paragraph", "Line 0 of th")]


def test_ligatures_become_letters(tmp_path: Path) -> None:
    """Nobody searches for a ligature: it is read as the letters that it is made of."""
    from reportlab.pdfbase import pdfmetrics
    from reportlab.pdfbase.ttfonts import TTFont

    font = next(Path("/usr/share/fonts").rglob("DejaVuSans.ttf"), None)
    if font is None:
        pytest.skip("there is no font with ligatures here")
    pdfmetrics.registerFont(TTFont("DejaVu", str(font)))
    canvas = Canvas(str(tmp_path / "a.pdf"), invariant=1)
    canvas.setFont("DejaVu", 12)
    canvas.drawString(72, 700, "The \ufb01ne o\ufb03ce \ufb02ows.")
    canvas.save()
    assert [block.text for block in pdf.load(str(tmp_path / "a.pdf"), Bounds()).blocks] == ["The fine office flows."]


# -- real files


def real(pattern: str) -> list[object]:
    """Those of the real-world files, by their names."""
    return [pytest.param(path, id=path.name) for path in sorted((DATA / "pdf").glob(pattern))]


class Places:
    """What stands in a box of a file, read anew."""

    def __init__(self, path: Path) -> None:
        self._document = pypdfium2.PdfDocument(str(path))
        self._number = 0

    def text(self, box: Box) -> str:
        if box.page != self._number:
            page, self._number = self._document[box.page - 1], box.page
            self._frame, self._text = Frame.of(page), page.get_textpage()
        left, bottom, right, top = self._frame.in_file(*box[1:])
        return str(self._text.get_text_bounded(left - 1, bottom - 1, right + 1, top + 1))


def letters(text: str) -> str:
    return "".join(filter(str.isalnum, unicodedata.normalize("NFKC", text)))


@needs_data
@pytest.mark.parametrize("path", real("*/*.pdf"))
def test_every_real_file_is_read_or_refused(path: Path) -> None:
    """Encrypted, broken, scanned, rotated or huge: blocks, each with its place on its page, which holds its text when it is read from there
    once more; or a reason that people understand."""
    outcome = read(by_suffix(), str(path), Bounds())
    if outcome.loaded is None:
        assert outcome.failure == "unreadable"
        assert "malformed (" not in outcome.message, "a library's own words are no reason"
        return
    places = Places(path)
    for block in outcome.loaded.blocks:
        assert block.boxes
        there = Counter(letters("".join(map(places.text, block.boxes))))
        missing = Counter(letters("".join(set(re.split(r"[|>\n]", block.text))))) - there if block.kind == "paragraph" else Counter[str]()
        assert missing.total() <= 0.05 * len(block.text), f"{block.text[:60]!r} does not stand in {block.boxes}"
        assert block.text.strip()
        assert all(box.x0 <= box.x1 and box.top <= box.bottom for box in block.boxes)
        if block.kind == "table":
            header, rule, *rows = block.text.split("\n")
            assert len(block.boxes) == 1 + len(rows)
            assert len({line.replace("\\|", "").count("|") for line in (header, rule, *rows)}) == 1


@needs_data
def test_a_real_statement_names_its_columns() -> None:
    """A quarterly report's income statement, which has no lines: every figure stands under its period."""
    loaded = pdf.load(str(DATA / "pdf" / "en_finance" / "2023 Q2 NVDA.pdf"), Bounds())
    table = next(block for block in loaded.blocks if block.kind == "table" and "| Cost of revenue |" in block.text)
    assert table.page == 3
    lines = table.text.split("\n")
    assert lines[0] == (
        "|  | Three Months Ended > July 30, 2023 | Three Months Ended > July 31, 2022 "
        "| Six Months Ended > July 30, 2023 | Six Months Ended > July 31, 2022 |"
    )
    assert "| Revenue | $ 13,507 | $ 6,704 | $ 20,699 | $ 14,992 |" in lines
    assert "A table of contents on page 2 makes no passages." in loaded.notes


#: Of tables that have no lines around their cells, read from the page by eye: file, page, the names of the columns, a row.
BY_EYE = [
    ("2023 Q2 NVDA.pdf", 10, "|  | Operating Lease Obligations > (In millions) |", "| Present value of net future minimum lease payments | 1,249 |"),
    ("2023 Q2 NVDA.pdf", 16, "| Inventories (1): | July 30, 2023 > (In millions) | January 29, 2023 > (In millions) |",
     "| Finished goods | 1,629 | 2,263 |"),
    ("2023 Q2 NVDA.pdf", 17, "| Other Assets: | July 30, 2023 > (In millions) | January 29, 2023 > (In millions) |", "| Other | 148 | 122 |"),
    ("2023 Q2 NVDA.pdf", 19, "|  | Expected Remaining Term (years) | Effective Interest Rate | Carrying Value at > July 30, 2023 > (In millions) "
     "| Carrying Value at > January 29, 2023 > (In millions) |", "| 3.70% Notes Due 2060 | 36.7 | 3.73% | 500 | 500 |"),
    ("2023 Q2 NVDA.pdf", 20, "|  | Commitments > (In millions) |", "| 2029 and thereafter | 468 |"),
    ("2023 Q2 NVDA.pdf", 23, "| (In millions) | Compute & Networking | Graphics | All Other | Consolidated |",
     "| Operating income (loss) | $ 2,422 | $ 3,133 | $ (3,188) | $ 2,367 |"),
    ("2023 Q2 NVDA.pdf", 23, "| (In millions) | Three Months Ended > July 30, 2023 | Three Months Ended > July 31, 2022 "
     "| Six Months Ended > July 30, 2023 | Six Months Ended > July 31, 2022 |", "| Contributions | — | (2) | — | (2) |"),
    ("2023 Q2 NVDA.pdf", 28, "|  | Three Months Ended > July 30, 2023 | Three Months Ended > July 31, 2022 "
     "| Six Months Ended > July 30, 2023 | Six Months Ended > July 31, 2022 |", "| Gross profit | 70.1 | 43.5 | 68.2 | 55.7 |"),
    ("2023 Q3 AMZN.pdf", 8, "|  | Three Months Ended September 30, > 2022 | Three Months Ended September 30, > 2023 "
     "| Nine Months Ended September 30, > 2022 | Nine Months Ended September 30, > 2023 |",
     "| Total dilutive effect of outstanding stock awards | 140 | 236 | — | 166 |"),
    ("2023 Q3 AMZN.pdf", 11, "|  | December 31, 2022 > Total Estimated Fair Value | September 30, 2023 > Cost or Amortized Cost "
     "| September 30, 2023 > Gross Unrealized Gains | September 30, 2023 > Gross Unrealized Losses "
     "| September 30, 2023 > Total Estimated Fair Value |",
     "| Equity securities (1) | 3,709 |  |  |  | 4,684 |"),
    ("2023 Q3 AMZN.pdf", 13, "| December 31, 2022 | Operating Leases | Finance Leases | Total |",
     "| Total long-term lease liabilities | $ 61,582 | $ 11,386 | $ 72,968 |"),
    ("2023 Q3 AMZN.pdf", 13, "| September 30, 2023 | Operating Leases | Finance Leases | Total |",
     "| Total long-term lease liabilities | $ 65,810 | $ 10,081 | $ 75,891 |"),
    ("2023 Q3 AMZN.pdf", 13, "|  | Three Months Ended December 31, > 2023 | Year Ended December 31, > 2024 | Year Ended December 31, > 2025 "
     "| Year Ended December 31, > 2026 | Year Ended December 31, > 2027 | Thereafter | Total |",
     "| Leases not yet commenced | 284 | 1,963 | 1,750 | 1,888 | 1,956 | 18,069 | 25,910 |"),
]  # fmt: skip


@pytest.fixture(scope="module")
def reports() -> dict[str, list[Block]]:
    """The tables of the two quarterly reports."""
    folder = DATA / "pdf" / "en_finance"
    return {path.name: [block for block in pdf.load(str(path), Bounds()).blocks if block.kind == "table"] for path in folder.glob("*.pdf")}


@needs_data
@pytest.mark.parametrize(("file", "page", "names", "row"), BY_EYE)
def test_real_tables_without_lines_are_as_people_read_them(reports: dict[str, list[Block]], file: str, page: int, names: str, row: str) -> None:
    """A row stands under the names of its own columns, of its own year, in one table."""
    tables = [block.text.split("\n") for block in reports[file] if block.page == page]
    assert [table for table in tables if table[0] == names and row in table], [table[0] for table in tables]


@needs_data
def test_a_real_page_on_its_side_has_the_table_of_the_upright_one() -> None:
    """The same page, shown so that its text runs down: the rows are the same, and their places are those of the page as it is shown."""
    names = ("nics-background-checks-2015-11.pdf", "nics-background-checks-2015-11-rotated.pdf")
    tables = [
        [block for block in pdf.load(str(DATA / "pdf" / "en_tables" / name), Bounds()).blocks if block.kind == "table"] for name in names
    ]
    assert [block.text for block in tables[0]] == [block.text for block in tables[1]]
    lines = tables[0][0].text.split("\n")
    assert lines[0].startswith("| NICS Firearm Background Checks November - 2015 > State / Territory | Permit | Handgun | Long Gun | *Other |")
    assert "| Pre-Pawn > Handgun | Pre-Pawn > Long Gun | Pre-Pawn > *Other | Redemption > Handgun |" in lines[0]
    assert "Return to Seller - Private Sale > Handgun" in lines[0]
    assert lines[2].startswith("| Alabama | 18,870 | 23,022 | 22,650 |")
    upright, aside = (found[0].boxes[1] for found in tables)
    assert upright.x1 - upright.x0 == pytest.approx(aside.bottom - aside.top, abs=1)


@needs_data
def test_the_tables_of_icdar_2013_are_found() -> None:
    """The committed benchmark on the published truth: F1 of the adjacency relations, over all and of each file."""
    import importlib.util
    import sys

    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec = importlib.util.spec_from_file_location("benchmark_tables", ROOT / "benchmarks" / "tables.py")
        assert spec is not None
        assert spec.loader is not None
        tables = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(tables)
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    files, micro, _ = tables.measure(DATA / "pdf" / "icdar2013")
    assert micro["f1"] > 0.999
    assert min(one["f1"] for one in files.values()) >= 0.99  # eu-004 has cells that only the gap between two characters parts


# -- pictures of text


needs_tesseract = pytest.mark.skipif(shutil.which("tesseract") is None, reason="tesseract is not installed")


def of_picture(name: str) -> Loaded:
    return pdf.load(str(DATA / "pdf" / "scan" / name), Bounds(ocr="tesseract"))


@needs_data
@needs_tesseract
@pytest.mark.parametrize("name", ["ocr_test.pdf", "ocr_test_rotated_90.pdf", "ocr_test_rotated_180.pdf"])
def test_a_scan_is_read_where_that_is_set(name: str) -> None:
    """Upright, on its side or on its head: the text is read in order, each block has its place, and a note says that it may hold errors."""
    loaded = of_picture(name)
    text = " ".join(block.text for block in loaded.blocks)
    assert text == "Docling bundles PDF document conversion to JSON and Markdown in an easy self contained package"
    assert all(isinstance(box, Box) and box.x1 > box.x0 for block in loaded.blocks for box in block.boxes)
    assert ["read by OCR" in note for note in loaded.notes] == [True]
