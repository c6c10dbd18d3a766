"""A page of a PDF as PDFium gives it: lines and words at their places, and how much of it is drawn.

Coordinates are points from the top left corner of the page as it is shown: rotated and cut to its crop box.
"""

from __future__ import annotations

import ctypes
import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import msgspec
import pypdfium2.raw as pdfium

from tidegate.retrieval.aligned import Rule, Word

#: A filled shape thicker than this, in points, is shading: its edges are no rules.
SHADING_PT = 4.0
#: Beyond this many paths a page is a drawing or a map.
DRAWING_PATHS = 20_000
#: A path of more segments is a curve.
_PATH_SEGMENTS = 512
#: A line may be so much aslant, in points.
_ASLANT = 1.0
_FORM_DEPTH = 4
#: A page is turned where more of its characters than this lie the same way.
UPRIGHT_SHARE = 0.8
#: Characters further apart than this share of their size are no word.
APART = 0.8
#: What begins so near to the end of a line, in shares of its height, and at its height, goes on with it; gutters are wider.
BESIDE = 0.35
#: A wider gap than this share of the font's size is a space.
WORD_GAP = 0.15
#: Places to look for what begins at one, in points.
_BUCKET_PT = 8.0
#: Weight of a font from which it is bold.
_BOLD = 600
# A line ends behind its hyphen: PDFium puts U+FFFE where a word was hyphenated at a line's end, and U+0002 where older fonts do so.
_LINE = re.compile("[^\r\n\ufffe\x02\xad]*[\ufffe\x02\xad]|[^\r\n\ufffe\x02\xad]+")
_WORD = re.compile(r"\S+")
#: What the ligature "ff" of TeX's fonts is called in files that name their characters wrong.
_MISNAMED = re.compile("(?<=[a-z])\u21b5")
#: PDFium's hyphens, and presentation forms that fonts are made of and nobody types: ligatures, Kangxi radicals.
_FORMS = dict.fromkeys((0xFFFE, 0x2, 0xAD), "-") | {
    code: unicodedata.normalize("NFKC", chr(code)) for code in (*range(0xFB00, 0xFB07), *range(0x2F00, 0x2FD6), *range(0x2E80, 0x2EF4))
}


_Box = tuple[float, float, float, float]
#: a, b, c, d, e, f: x' = a x + c y + e, y' = b x + d y + f.
Matrix = tuple[float, float, float, float, float, float]


class Line(msgspec.Struct):
    """A line of text at its place, and the words that it is made of. `size`: the font's, to half a point. `upright`: it runs up or down the
    page as it is read."""

    text: str
    x0: float
    top: float
    x1: float
    bottom: float
    size: float = 0.0
    bold: bool = False
    words: list[Word] = []
    upright: bool = False


class Drawn(msgspec.Struct):
    """What is drawn on a page: lines (x0, x1, y across; top, bottom, x down), and the share of the page that pictures cover, 1.0 at most.
    `paths`: how many there are; of a drawing of too many the lines are not taken."""

    paths: int = 0
    pictures: float = 0.0
    across: list[Rule] = []
    down: list[Rule] = []


class Frame(msgspec.Struct, frozen=True):
    """From the file's own coordinates (from the bottom left, not rotated) to the page as it is shown, or as it is read."""

    left: float
    bottom: float
    right: float
    top: float
    rotation: int

    @classmethod
    def of(cls, page: Any) -> Frame:
        """Raises nothing: a crop box outside the page's media box is not obeyed, as viewers do."""
        media, crop = page.get_mediabox(), page.get_cropbox()
        box = (max(media[0], crop[0]), max(media[1], crop[1]), min(media[2], crop[2]), min(media[3], crop[3]))
        if box[0] >= box[2] or box[1] >= box[3]:
            box = media
        return cls(*box, page.get_rotation())

    @property
    def width(self) -> float:
        return self.right - self.left if self.rotation in (0, 180) else self.top - self.bottom

    @property
    def height(self) -> float:
        return self.top - self.bottom if self.rotation in (0, 180) else self.right - self.left

    def shown(self, x0: float, y0: float, x1: float, y1: float) -> tuple[float, float, float, float]:
        """x0, top, x1, bottom."""
        if self.rotation == 90:
            return y0 - self.bottom, x0 - self.left, y1 - self.bottom, x1 - self.left
        if self.rotation == 180:
            return self.right - x1, y0 - self.bottom, self.right - x0, y1 - self.bottom
        if self.rotation == 270:
            return self.top - y1, self.right - x1, self.top - y0, self.right - x0
        return x0 - self.left, self.top - y1, x1 - self.left, self.top - y0

    def in_file(self, x0: float, top: float, x1: float, bottom: float) -> tuple[float, float, float, float]:
        """The way back: x0, y0, x1, y1 from the bottom left."""
        if self.rotation == 90:
            return top + self.left, x0 + self.bottom, bottom + self.left, x1 + self.bottom
        if self.rotation == 180:
            return self.right - x1, top + self.bottom, self.right - x0, bottom + self.bottom
        if self.rotation == 270:
            return self.right - bottom, self.top - x1, self.right - top, self.top - x0
        return x0 + self.left, self.top - bottom, x1 + self.left, self.top - top

    def turned(self, degrees: int) -> Frame:
        """The page turned clockwise."""
        return msgspec.structs.replace(self, rotation=(self.rotation + degrees) % 360)


def upright(page: Any, frame: Frame) -> Frame:
    """The page turned so that most of its text stands upright: a table may lie on its side."""
    with closing(page.get_textpage()) as textpage:
        raw, count = textpage.raw, textpage.count_chars()
        angles = Counter(
            _quarters(raw, at)
            for at in range(0, count, count // 200 + 1)
            if not pdfium.FPDFText_IsGenerated(raw, at)  # spaces and line ends that stand nowhere
        )
    if not angles:
        return frame
    ((quarters, times),) = angles.most_common(1)
    turned = (-quarters * 90 - frame.rotation) % 360  # angles are those of the file's own coordinates
    return frame.turned(turned) if turned and times > UPRIGHT_SHARE * angles.total() else frame


def _quarters(raw: Any, at: int) -> int:
    """By how many quarters a character is turned, in the file's own coordinates."""
    return round(math.degrees(pdfium.FPDFText_GetCharAngle(raw, at)) / 90) % 4


def lines(page: Any, frame: Frame) -> list[Line]:
    """In the order of the file. What stands outside the page as it is shown is no part of it."""
    found = []
    with closing(page.get_textpage()) as textpage:
        raw = textpage.raw
        # One character for each of PDFium's, so that places in the text are its indices: half of a surrogate pair is one, too.
        text = "".join(chr(pdfium.FPDFText_GetUnicode(raw, at) or 0xFFFD) for at in range(textpage.count_chars()))
        for line in _LINE.finditer(text):
            # It may begin with a footnote's mark.
            size = round(max(_size(raw, line.start()), _size(raw, (line.start() + line.end()) // 2)) * 2) / 2
            bold = _is_bold(raw, line.start()) and _is_bold(raw, line.end() - 1)
            upright = (_quarters(raw, line.start()) - frame.rotation // 90) % 2 == 1
            words: list[Word] = []
            for word in _WORD.finditer(text, line.start(), line.end()):
                for first, last, box in _pieces(raw, word.start(), word.end()):
                    clean, shown = _clean(text[first:last]), frame.shown(*box)
                    if not (clean and _is_shown(shown, frame)):
                        continue
                    if words and not upright and (shown[1] > words[-1].bottom or shown[3] < words[-1].top):  # it stands on another line
                        found.append(line_of(words, size, bold))
                        words = []
                    words.append(Word(clean, *shown))
            if words:
                found.append(line_of(words, size, bold, upright))
    return found


def _pieces(raw: Any, start: int, end: int) -> Iterator[tuple[int, int, _Box]]:
    """A word's characters from where to where, with their box; in parts where they stand apart: PDFium puts no space between the cells of
    a table whose texts follow each other in the file."""
    first, around = start, _char_box(raw, start)
    last = around
    for at in range(start + 1, end):
        box = _char_box(raw, at)
        aside = max(box[0] - last[2], last[0] - box[2], box[1] - last[3], last[1] - box[3])
        if aside > APART * max(last[2] - last[0], last[3] - last[1], box[2] - box[0]) > 0:
            yield first, at, around
            first, around = at, box
        else:
            around = min(around[0], box[0]), min(around[1], box[1]), max(around[2], box[2]), max(around[3], box[3])
        last = box
    yield first, end, around


def line_of(words: list[Word], size: float, bold: bool = False, upright: bool = False) -> Line:
    """Words of one line, in their order."""
    return Line(
        " ".join(word.text for word in words),
        min(word.x0 for word in words), min(word.top for word in words), max(word.x1 for word in words), max(word.bottom for word in words),
        size, bold, words, upright,
    )  # fmt: skip


def whole(lines: Sequence[Line]) -> list[Line]:
    """Lines as people see them: PDFium ends one at every mark that stands higher or lower, such as that of a footnote."""
    by_start: defaultdict[int, list[Line]] = defaultdict(list)
    for line in lines:
        by_start[int(line.x0 / _BUCKET_PT)].append(line)
    made: list[Line] = []
    taken: set[int] = set()
    for first in sorted(lines, key=lambda line: line.x0):
        if id(first) in taken:
            continue
        joined = last = first
        while (following := _beside(last, by_start, taken)) is not None:
            taken.add(id(following))
            larger = max(joined, following, key=lambda line: line.size)
            space = " " if following.x0 - last.x1 > WORD_GAP * larger.size else ""
            joined = Line(
                joined.text + space + following.text, joined.x0, min(joined.top, following.top), max(joined.x1, following.x1),
                max(joined.bottom, following.bottom), larger.size, larger.bold, [*joined.words, *following.words],
            )  # fmt: skip
            last = following
        made.append(joined)
    return made


def _beside(line: Line, by_start: dict[int, list[Line]], taken: set[int]) -> Line | None:
    """The line that begins where this one ends, at about its height."""
    if line.upright:
        return None
    reach = BESIDE * (line.bottom - line.top)
    for bucket in range(int((line.x1 - reach) / _BUCKET_PT), int((line.x1 + reach) / _BUCKET_PT) + 1):
        for other in by_start.get(bucket, ()):
            if other is line or other.upright or id(other) in taken or other.x1 <= line.x1:
                continue
            lower, higher = sorted((line.bottom - line.top, other.bottom - other.top))
            shared = min(line.bottom, other.bottom) - max(line.top, other.top)
            if abs(other.x0 - line.x1) <= BESIDE * higher and shared > 0.5 * lower:
                return other
    return None


def drawn(page: Any, frame: Frame) -> Drawn:
    found = Drawn()
    items = [pdfium.FPDFPage_GetObject(page.raw, at) for at in range(pdfium.FPDFPage_CountObjects(page.raw))]
    _look_at(items, (1.0, 0.0, 0.0, 1.0, 0.0, 0.0), frame, found, 0)
    found.pictures = min(1.0, found.pictures / (frame.width * frame.height or 1.0))
    return found


def _look_at(items: list[Any], matrix: Matrix, frame: Frame, found: Drawn, depth: int) -> None:
    """`found.pictures` is counted in square points here."""
    for item in items:
        kind = pdfium.FPDFPageObj_GetType(item)
        if kind == pdfium.FPDF_PAGEOBJ_PATH:
            found.paths += 1
            if found.paths <= DRAWING_PATHS:
                _take_lines(item, matrix, frame, found)
        elif kind == pdfium.FPDF_PAGEOBJ_IMAGE:
            x0, y0, x1, y1 = _bounds(item)
            found.pictures += max(0.0, x1 - x0) * max(0.0, y1 - y0) * abs(matrix[0] * matrix[3] - matrix[1] * matrix[2])
        elif kind == pdfium.FPDF_PAGEOBJ_FORM and depth < _FORM_DEPTH:
            inner = [pdfium.FPDFFormObj_GetObject(item, at) for at in range(pdfium.FPDFFormObj_CountObjects(item))]
            _look_at(inner, _product(_matrix(item), matrix), frame, found, depth + 1)


def _take_lines(item: Any, matrix: Matrix, frame: Frame, found: Drawn) -> None:
    """The straight lines of a path across and down. Of a filled shape those of a thin one only, for shading has edges and no rules."""
    count = pdfium.FPDFPath_CountSegments(item)
    if not 2 <= count <= _PATH_SEGMENTS:
        return
    fill, stroke = ctypes.c_int(), ctypes.c_int()
    pdfium.FPDFPath_GetDrawMode(item, ctypes.byref(fill), ctypes.byref(stroke))
    if not (fill.value or stroke.value):
        return
    x0, y0, x1, y1 = _bounds(item) if not stroke.value else (0.0, 0.0, 0.0, 0.0)
    if min(x1 - x0, y1 - y0) > SHADING_PT:
        return
    matrix = _product(_matrix(item), matrix)
    x, y = ctypes.c_float(), ctypes.c_float()
    start = last = (0.0, 0.0)
    for at in range(count):
        segment = pdfium.FPDFPath_GetPathSegment(item, at)
        pdfium.FPDFPathSegment_GetPoint(segment, ctypes.byref(x), ctypes.byref(y))
        point = (matrix[0] * x.value + matrix[2] * y.value + matrix[4], matrix[1] * x.value + matrix[3] * y.value + matrix[5])
        kind = pdfium.FPDFPathSegment_GetType(segment)
        if kind == pdfium.FPDF_SEGMENT_MOVETO:
            start = point
        elif kind == pdfium.FPDF_SEGMENT_LINETO:
            _take_line(last, point, frame, found)
        last = point
        if pdfium.FPDFPathSegment_GetClose(segment):
            _take_line(last, start, frame, found)
            last = start


def _take_line(one: tuple[float, float], other: tuple[float, float], frame: Frame, found: Drawn) -> None:
    x0, top, x1, bottom = frame.shown(min(one[0], other[0]), min(one[1], other[1]), max(one[0], other[0]), max(one[1], other[1]))
    if bottom - top <= _ASLANT < x1 - x0:
        found.across.append((x0, x1, (top + bottom) / 2))
    elif x1 - x0 <= _ASLANT < bottom - top:
        found.down.append((top, bottom, (x0 + x1) / 2))


def _matrix(item: Any) -> Matrix:
    found = pdfium.FS_MATRIX()
    if not pdfium.FPDFPageObj_GetMatrix(item, ctypes.byref(found)):
        return (1.0, 0.0, 0.0, 1.0, 0.0, 0.0)
    return found.a, found.b, found.c, found.d, found.e, found.f


def _product(first: Matrix, then: Matrix) -> Matrix:
    a, b, c, d, e, f = first
    g, h, i, j, k, m = then
    return a * g + b * i, a * h + b * j, c * g + d * i, c * h + d * j, e * g + f * i + k, e * h + f * j + m


def _bounds(item: Any) -> _Box:
    """x0, y0, x1, y1 as the file has them; nothing, where it has none."""
    sides = [ctypes.c_float() for _ in range(4)]
    pdfium.FPDFPageObj_GetBounds(item, *sides)
    x0, y0, x1, y1 = (side.value for side in sides)
    return x0, y0, x1, y1


def _clean(text: str) -> str:
    """NUL and lone surrogates, which no database stores, become U+FFFD; presentation forms become letters."""
    if text.isascii() and text.isprintable():
        return text
    whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").translate(_FORMS)
    whole = _MISNAMED.sub("ff", whole)
    return "".join(char if char.isprintable() else "\ufffd" for char in whole)


def _size(raw: Any, at: int) -> float:
    """Of the font as it is shown, in points: a file may name the size 1 and stretch it (ISO 32000-1, 9.3.1 and 9.4.4)."""
    found = pdfium.FS_MATRIX()
    stretched = math.hypot(found.c, found.d) if pdfium.FPDFText_GetMatrix(raw, at, ctypes.byref(found)) else 1.0
    return float(pdfium.FPDFText_GetFontSize(raw, at)) * (stretched or 1.0)


def _is_bold(raw: Any, at: int) -> bool:
    if pdfium.FPDFText_GetFontWeight(raw, at) >= _BOLD:
        return True
    name = ctypes.create_string_buffer(64)
    pdfium.FPDFText_GetFontInfo(raw, at, name, len(name), None)
    return b"bold" in name.value.lower() or b"black" in name.value.lower()


def _char_box(raw: Any, at: int) -> _Box:
    box = pdfium.FS_RECTF()
    if not pdfium.FPDFText_GetLooseCharBox(raw, at, ctypes.byref(box)):
        return 0.0, 0.0, 0.0, 0.0
    return min(box.left, box.right), min(box.bottom, box.top), max(box.left, box.right), max(box.bottom, box.top)


def _is_shown(box: _Box, frame: Frame) -> bool:
    x, y = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    return -1 <= x <= frame.width + 1 and -1 <= y <= frame.height + 1
