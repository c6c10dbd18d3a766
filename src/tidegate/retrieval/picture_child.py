"""The process that draws one page: `python -m tidegate.retrieval.picture_child PAGE MEMORY_BYTES`, the PDF on stdin, an Outcome in msgpack out.

It draws one page and ends: nothing of a hostile file is left for the next one. The parent kills it when its time is up.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
import zlib
from contextlib import closing
from typing import Any

import msgspec
import pypdfium2
import pypdfium2.raw as pdfium

from tidegate.core.document import PagePicture
from tidegate.retrieval.pdf_text import Frame
from tidegate.retrieval.picture import MOST_PIXELS, MOST_SCALE, Outcome

_PR_SET_PDEATHSIG = 1


def draw(file: bytes, number: int) -> Outcome:
    """Never raises what a file can cause."""
    try:
        with closing(pypdfium2.PdfDocument(file)) as document:
            if not 1 <= number <= len(document):
                return Outcome(message=f"There is no page {number}: the document has {len(document)}.", missing=True)
            with closing(_as_shown(document, number - 1)) as page:
                return Outcome(_picture(page))
    except pypdfium2.PdfiumError as error:
        if error.err_code == pdfium.FPDF_ERR_PASSWORD:
            return Outcome(message="The document is encrypted and opens only with a password.")
        return Outcome(message=f"The document cannot be drawn: {error}")
    except MemoryError:
        return Outcome(message=f"Drawing page {number} takes too much memory.")
    except Exception as error:  # noqa: BLE001 - whatever a malformed file makes its parser raise; the file is at fault
        return Outcome(message=f"Page {number} cannot be drawn ({type(error).__name__}).")


def _as_shown(document: Any, index: int) -> Any:
    """The page, cut as the boxes of passages take it to be: PDFium makes nothing of a page whose crop box lies outside."""
    page = document[index]
    frame = Frame.of(page)
    width, height = page.get_size()
    if abs(width - frame.width) > 0.1 or abs(height - frame.height) > 0.1:
        page.set_cropbox(frame.left, frame.bottom, frame.right, frame.top)
        page.close()
        page = document[index]
    return page


def _picture(page: Any) -> PagePicture:
    width, height = page.get_size()
    scale = min(MOST_SCALE, MOST_PIXELS / max(width, height, 1.0))
    bitmap = page.render(scale=scale, rev_byteorder=True)
    return PagePicture(_png(bytes(bitmap.buffer), bitmap.width, bitmap.height, bitmap.stride, bitmap.n_channels), width, height)


def _png(pixels: bytes, width: int, height: int, stride: int, channels: int) -> bytes:
    """As a file (PNG 1.2, https://www.w3.org/TR/png): 8 bits a sample, no filter, rows from the top."""
    kind = {1: 0, 3: 2, 4: 6}[channels]
    rows = b"".join(b"\0" + pixels[at * stride : at * stride + width * channels] for at in range(height))
    parts = ((b"IHDR", struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)), (b"IDAT", zlib.compress(rows, 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in parts
    )


def main() -> None:
    """Draws what comes in."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    # Libraries that print would break the answer: what they print goes to stderr.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    number, memory_bytes = int(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    out.write(msgspec.msgpack.encode(draw(sys.stdin.buffer.read(), number)))
    out.flush()


if __name__ == "__main__":
    main()
