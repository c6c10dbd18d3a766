"""Pages that are pictures, read by tesseract: a program of its own, found on the PATH, in a process of its own."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import time
from typing import Any, NamedTuple

from tidegate.core.errors import SettingsError
from tidegate.retrieval.aligned import Word
from tidegate.retrieval.pdf_text import Frame, Line, line_of

HINT = "If it is a scan, set retrieval.ocr to tesseract, or run it through OCR first (ocrmypdf)."
PROGRAM = "tesseract"
#: Dots per inch of the picture that is read, and the longest side that it may have: a page may be as large as its author says.
DPI, MAX_PIXELS = 300, 6_000
#: Words of which the program is less sure, in percent, are left out.
LEAST_SURE = 30.0
#: A page of whose words the program is less sure on the whole is tried once more, turned round.
TURNED = 75.0
_PR_SET_PDEATHSIG = 1


def check(languages: str) -> None:
    """Raises SettingsError where the program or one of its languages is missing."""
    path = shutil.which(PROGRAM)
    if path is None:
        raise SettingsError(
            "retrieval.ocr is tesseract, but there is no such program on the PATH.",
            hint="Install it (Debian: apt install tesseract-ocr tesseract-ocr-chi-sim), or set retrieval.ocr to off.",
        )
    listed = subprocess.run([path, "--list-langs"], capture_output=True, text=True, timeout=30, check=False).stdout.split("\n")[1:]
    known = sorted(filter(None, (name.strip() for name in listed)))
    missing = [name for name in (*languages.split("+"), "osd") if name not in known]
    if missing:
        raise SettingsError(
            f"tesseract does not know the language {missing[0]!r} of retrieval.ocr_languages (known: {', '.join(known)}).",
            hint=f"Install it (Debian: apt install tesseract-ocr-{missing[0].replace('_', '-')}), or name another.",
        )


class Read(NamedTuple):
    """`turned`: the page stands on its head, and the lines are where they would be if it stood upright. `note`: what to say of it."""

    lines: list[Line]
    note: str
    turned: bool = False


class _Picture(NamedTuple):
    """Grey values, one byte each, row by row from the top."""

    width: int
    height: int
    grey: bytes

    @classmethod
    def of(cls, bitmap: Any) -> _Picture:
        rows, stride = bytes(bitmap.buffer), bitmap.stride  # a row may be padded
        return cls(bitmap.width, bitmap.height, b"".join(rows[at * stride : at * stride + bitmap.width] for at in range(bitmap.height)))

    def turned(self) -> _Picture:
        """By 180 degrees."""
        return self._replace(grey=self.grey[::-1])

    @property
    def pgm(self) -> bytes:
        """As a file (portable graymap)."""
        return b"P5 %d %d 255\n" % (self.width, self.height) + self.grey


def read(page: Any, frame: Frame, languages: str, left_s: float) -> Read:
    """Never raises what the page can cause."""
    scale = min(DPI / 72, MAX_PIXELS / max(frame.width, frame.height, 1.0))
    picture = _Picture.of(page.render(scale=scale, grayscale=True))
    ends_ns = time.perf_counter_ns() + int(left_s * 1e9)
    try:
        lines, sure = _lines(_run(picture, languages, scale, ends_ns), scale)
        turned = False
        if sure < TURNED:  # it may stand on its head, which the program tells only from a page full of text
            other, surer = _lines(_run(picture.turned(), languages, scale, ends_ns), scale)
            if turned := surer > sure:
                lines = other
    except subprocess.TimeoutExpired:
        return Read([], "reading it took too long, it was left out")
    except (OSError, subprocess.CalledProcessError) as error:
        return Read([], f"it could not be read ({type(error).__name__}), it was left out")
    return Read(lines, "its text was read by OCR and may hold errors" if lines else "OCR found no text on it, it was left out", turned)


def _run(picture: _Picture, languages: str, scale: float, ends_ns: int) -> str:
    # 1: turn what lies on its side, find columns and lines.
    command = [PROGRAM, "stdin", "stdout", "-l", languages, "--psm", "1", "--dpi", str(round(72 * scale)), "tsv"]
    left_s = max(1.0, (ends_ns - time.perf_counter_ns()) / 1e9)
    environment = {**os.environ, "OMP_THREAD_LIMIT": "1"}  # its threads wait for each other more than they work
    done = subprocess.run(
        command, input=picture.pgm, capture_output=True, timeout=left_s, check=True, env=environment, preexec_fn=_die_with_parent
    )
    return done.stdout.decode("utf-8", "replace")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _lines(tsv: str, scale: float) -> tuple[list[Line], float]:
    """The lines, and how sure the program is of its words, in percent. Columns: level, page, block, paragraph, line, word, left, top, width,
    height, confidence, text."""
    lines: dict[tuple[str, ...], list[Word]] = {}
    sure = []
    for row in tsv.split("\n")[1:]:
        fields = row.split("\t")
        if len(fields) != 12 or not fields[11].strip():
            continue
        sure.append(float(fields[10]))
        if sure[-1] >= LEAST_SURE:
            left, top, width, height = (int(field) / scale for field in fields[6:10])
            lines.setdefault(tuple(fields[1:5]), []).append(Word(fields[11].strip(), left, top, left + width, top + height))
    return [line_of(words, 0.0) for words in lines.values()], sum(sure) / len(sure) if sure else 0.0
