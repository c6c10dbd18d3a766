"""A document as it is stored: who it is, and the passages that can be quoted from it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec


class Box(NamedTuple):
    """A place on a page: points (1/72 inch) from the top left corner of the page as it is shown. In JSON: [page, x0, top, x1, bottom]."""

    page: int
    x0: float
    top: float
    x1: float
    bottom: float


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """One document of a collection; `source` (a path or URI) names it there.

    - `sha256`: hex digest of the content *and* of whatever else decides what is stored (loader and chunker version, embedding model), so
      that "same digest" means "nothing to do".
    - `tags`: what a search may filter on; every passage of the document carries them.
    - `superseded_by`, `version`, `passages`, `ingested_unix_s` are the store's: what they hold on the way in is ignored.
    """

    collection: str
    source: str
    title: str
    sha256: str
    size_bytes: int = 0
    tags: dict[str, str] = {}
    #: What it is dated; None: the time of its ingest.
    dated_unix_s: float | None = None
    #: How far it may be trusted, 0 to 1.
    confidence: float = 1.0
    #: Sources of the same collection that this one takes the place of: they stay, and are not quoted unless a search asks for them.
    supersedes: tuple[str, ...] = ()
    #: Of the embedder of its vectors (`Embedder.fingerprint`); "": not said, and not looked at.
    fingerprint: str = ""
    #: The source that takes its place, if one does.
    superseded_by: str | None = None
    #: 1 for the first ingest, one more for each one that replaced it.
    version: int = 0
    passages: int = 0
    ingested_unix_s: float = 0.0


class NewPassage(msgspec.Struct, frozen=True):
    """A passage on its way into the store, in the order of the document.

    `heading` is the path of headings above it, e.g. "Claims > Deadlines". `tags` are added to the document's own and win over them.
    `boxes`: where it stands, one box or more a page; [] where the format has no pages. `words`: those it is found by, each as often as it occurs,
    as `core.words` makes them; without any, only its vector finds it.
    """

    text: str
    page: int | None = None
    heading: str = ""
    tokens: int = 0
    tags: dict[str, str] = {}
    boxes: list[Box] = []
    words: list[str] = []


class Replaced(msgspec.Struct, frozen=True):
    """What `replace_document` did, in passages. `notes`: sentences about content that had to be changed to be stored."""

    added: int
    kept: int
    removed: int
    version: int
    notes: list[str] = []


class Unembedded(msgspec.Struct, frozen=True):
    """A document whose vectors are of another embedder than is wanted. `passages`: id, heading and text of each, in order."""

    collection: str
    source: str
    title: str
    version: int
    passages: list[tuple[str, str, str]]


class StoredPassage(msgspec.Struct, frozen=True):
    """A passage as the store holds it now, for people who look where it stands. `file_sha256`: hex digest of the original bytes of its
    document, where the store keeps them."""

    id: str
    source: str
    title: str
    text: str
    page: int | None = None
    heading: str = ""
    boxes: list[Box] = []
    file_sha256: str | None = None


class PagePicture(msgspec.Struct, frozen=True):
    """A page as it is shown: a PNG of the whole of it. `width`, `height`: the page's in points, as boxes count them."""

    png: bytes
    width: float
    height: float


def passage_ids(document: Document, passages: Sequence[NewPassage]) -> list[str]:
    """The passages' ids: 24 hex digits, stable by content.

    The same text in the same document keeps its id when text around it changes; a text that occurs twice gets two ids.
    """
    seen: Counter[str] = Counter()
    ids = []
    for passage in passages:
        name = "\0".join((document.collection, document.source, passage.text, str(seen[passage.text])))
        ids.append(hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:24])
        seen[passage.text] += 1
    return ids
