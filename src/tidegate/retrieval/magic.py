"""A file is what its first bytes say, not what its name says."""

from __future__ import annotations

import codecs

from tidegate.core.errors import DocumentUnreadable

HEAD_BYTES = 4096

#: First bytes of what is commonly renamed, and what to call it.
_KNOWN = (
    (b"\xff\xd8\xff", "a JPEG picture"),
    (b"\x89PNG\r\n\x1a\n", "a PNG picture"),
    (b"GIF8", "a GIF picture"),
    (b"II*\x00", "a TIFF picture"),
    (b"MM\x00*", "a TIFF picture"),
    (b"PK\x03\x04", "a ZIP archive or an Office file (docx, xlsx, pptx)"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Office file (doc, xls, ppt)"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"\x7fELF", "a program"),
    (b"{\\rtf", "an RTF document"),
)

#: Suffixes of Office files: ZIP archives.
_OFFICE = (".docx", ".xlsx", ".xlsm")


def check(head: bytes, suffix: str) -> None:
    """`head`: the first HEAD_BYTES of a file named `*suffix`. Raises DocumentUnreadable where the two do not agree."""
    if not head:
        raise DocumentUnreadable("The file is empty (0 bytes).")
    # Readers accept a PDF header anywhere in the first 1024 bytes (ISO 32000, annex H).
    is_pdf = b"%PDF-" in head[:1024]
    if suffix == ".pdf":
        if is_pdf:
            return
        what = _name(head) or "no PDF (it has no %PDF- header)"
        raise DocumentUnreadable(f"The file is {what}, named .pdf.", hint="Give it its right name, or export the document as a PDF again.")
    if suffix in _OFFICE:
        if head.startswith(b"PK\x03\x04"):
            return
        if head.startswith(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"):
            hint = f"Open it and save it as {suffix} without a password."
            raise DocumentUnreadable(f"The file is an old Office file or an encrypted one, named {suffix}.", hint=hint)
        what = "a PDF" if is_pdf else _name(head) or "no Office file (it has no ZIP header)"
        raise DocumentUnreadable(f"The file is {what}, named {suffix}.", hint="Give it its right name, or save the document again.")
    other = "a PDF" if head.startswith(b"%PDF-") else _name(head)
    if other is None and b"\0" in head and not head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        other = "binary (it holds NUL bytes)"
    if other:
        raise DocumentUnreadable(f"The file is {other}, named {suffix}.", hint="Give it its right name, or convert it to text (UTF-8).")


def _name(head: bytes) -> str | None:
    return next((name for start, name in _KNOWN if head.startswith(start)), None)
