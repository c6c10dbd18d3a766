"""Office files (docx, xlsx): ZIP archives of XML, read member by member, within bounds, without document types and their entities."""

from __future__ import annotations

import posixpath
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import IO
from xml.parsers import expat

from tidegate.core.errors import DocumentUnreadable
from tidegate.retrieval.loaded import Bounds

#: A file may hold so many times its own bound when it is unpacked: office files are text, which packs well.
UNPACKED = 8
#: Members of an archive at most.
MAX_MEMBERS = 20_000
#: Elements inside each other at most.
MAX_DEPTH = 500
_CHUNK_BYTES = 1 << 16
#: How members may be packed (ISO/IEC 29500-2, 7.3.3).
_PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)

Start = Callable[[str, dict[str, str]], None]


class Package:
    """One archive. All methods raise DocumentUnreadable."""

    def __init__(self, path: str, bounds: Bounds) -> None:
        self._left_bytes = UNPACKED * bounds.max_bytes
        try:
            self._zip = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
            raise DocumentUnreadable(f"The file is a broken archive: {error}.", hint="Save or download it again.") from None
        self._names = {member.filename.replace("\\", "/") for member in self._zip.infolist()}
        if len(self._names) > MAX_MEMBERS:
            raise DocumentUnreadable(f"The archive holds {len(self._names)} members, more than {MAX_MEMBERS}.", hint="Save the document again.")
        if any(member.compress_type not in _PACKED for member in self._zip.infolist()):  # others unpack without a bound on one step
            raise DocumentUnreadable("The archive is packed in a way that office files are not.", hint="Save the document again.")

    def close(self) -> None:
        self._zip.close()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def parse(self, name: str, start: Start, end: Callable[[str], None], text: Callable[[str], None]) -> None:
        """Tell a member's elements, by their names without namespaces, and their text. What the handlers raise goes through."""
        parser = expat.ParserCreate(namespace_separator=" ")
        parser.buffer_text = True
        depth = 0

        def begin(element: str, attributes: dict[str, str]) -> None:
            nonlocal depth
            depth += 1
            if depth > MAX_DEPTH:
                raise DocumentUnreadable(f"{name} holds more than {MAX_DEPTH} elements inside each other.", hint="Save the document again.")
            start(_local(element), {_local(key): value for key, value in attributes.items()})

        def finish(element: str) -> None:
            nonlocal depth
            depth -= 1
            end(_local(element))

        def doctype(*_: object) -> None:
            raise DocumentUnreadable(f"{name} declares a document type, which office files do not.", hint="Save the document again.")

        parser.StartElementHandler, parser.EndElementHandler = begin, finish
        parser.CharacterDataHandler, parser.StartDoctypeDeclHandler = text, doctype
        try:
            with self._zip.open(name) as stream:
                for chunk in self._chunks(stream):
                    parser.Parse(chunk, False)
                parser.Parse(b"", True)
        except expat.ExpatError as error:
            raise DocumentUnreadable(f"{name} is broken XML: {error}.", hint="Save the document again.") from None
        except RuntimeError:  # what zipfile raises for a member with a password
            raise DocumentUnreadable("The file is encrypted and opens only with a password.", hint="Save a copy without the password.") from None
        except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, zlib.error) as error:
            raise DocumentUnreadable(f"{name} cannot be unpacked: {error}.", hint="Save or download it again.") from None

    def _chunks(self, stream: IO[bytes]) -> Iterator[bytes]:
        while chunk := stream.read(_CHUNK_BYTES):
            self._left_bytes -= len(chunk)
            if self._left_bytes < 0:
                hint = "If it is no trap, split it, or raise retrieval.max_file_mib."
                raise DocumentUnreadable("The file unpacks to more than office files of its size do.", hint=hint)
            yield chunk

    def relations(self, of: str) -> dict[str, str]:
        """Targets of a member's relations by their ids, as names in the archive."""
        folder, file = posixpath.split(of)
        name = f"{folder}/_rels/{file}.rels"
        targets: dict[str, str] = {}

        def start(element: str, attributes: dict[str, str]) -> None:
            if element == "Relationship" and attributes.get("TargetMode") != "External":
                target = attributes.get("Target", "")
                targets[attributes.get("Id", "")] = target.lstrip("/") if target.startswith("/") else posixpath.normpath(f"{folder}/{target}")

        if name in self:
            self.parse(name, start, _nothing, _nothing)
        return targets

    def title(self) -> str:
        """From the document's properties; "" where it has none."""
        return self.text_of("docProps/core.xml", "title")

    def text_of(self, name: str, element: str) -> str:
        """The text of the first element of that name in a member; "" where there is none."""
        parts: list[str] = []
        inside = 0

        def start(found: str, _: dict[str, str]) -> None:
            nonlocal inside
            inside += found == element or inside > 0

        def end(_: str) -> None:
            nonlocal inside
            inside -= inside > 0

        if name in self:
            self.parse(name, start, end, lambda text: parts.append(text) if inside else None)
        return "".join(parts).strip()


def _local(name: str) -> str:
    return name.rpartition(" ")[2]


def _nothing(_: str) -> None:
    return
