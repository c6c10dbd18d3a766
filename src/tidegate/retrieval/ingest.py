"""Files and folders into a collection: changed documents only, one transaction each; a bad file is reported and the rest goes on."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from tidegate.core.document import Document, NewPassage, Replaced
from tidegate.core.errors import BadRequest, DocumentUnreadable, OtherEmbedder
from tidegate.core.ports import DocumentStore, Embedder, Vectors
from tidegate.core.words import VERSION as WORDS_VERSION
from tidegate.core.words import words
from tidegate.retrieval import bulk, chunk, language, ocr, picture, structure
from tidegate.retrieval.load import Loader
from tidegate.retrieval.load_child import by_suffix
from tidegate.retrieval.loaded import Bounds, Loaded
from tidegate.retrieval.settings import RetrievalSettings
from tidegate.retrieval.structure import Rules
from tidegate.retrieval.walk import shown, walk

T = TypeVar("T")

#: Raised by one when a loader makes other blocks of the same bytes than before.
LOADERS_VERSION = 3
#: A title is shown in one line.
TITLE_CHARS = 200

Step = Literal["reading", "embedding", "stored", "unchanged", "failed"]


class Progress(msgspec.Struct, frozen=True):
    """Where the ingest stands: `done` of `total` documents, with so many of all their bytes; `path` is the one that something happened to last.
    `passages` are embedded since the start."""

    done: int
    total: int
    path: str
    step: Step
    passages: int = 0
    done_bytes: int = 0
    total_bytes: int = 0


class IngestReport(msgspec.Struct):
    """What became of every path. All paths are absolute; `why` and notes are sentences for people."""

    stored: list[str] = []
    unchanged: list[str] = []
    #: (path, why): hidden or not understood, not an error.
    skipped: list[tuple[str, str]] = []
    #: (path, why): could not be read. What an earlier ingest stored of it stays.
    failed: list[tuple[str, str]] = []
    #: (path, note): read, but something was left out or is doubtful.
    notes: list[tuple[str, str]] = []
    #: Documents of the collection whose file is gone; still searchable unless `pruned`.
    vanished: list[str] = []
    pruned: bool = False
    #: Passages of the documents that were stored.
    passages: int = 0
    seconds: float = 0.0

    def sort(self) -> None:
        """Documents are done in no order; a report has one."""
        for found in (self.stored, self.unchanged, self.skipped, self.failed, self.notes, self.vanished):
            found.sort()


class Given(msgspec.Struct, frozen=True):
    """What is said of all documents of one ingest; it wins over what they say of themselves. `supersedes`: paths, as front matter has them."""

    tags: Mapping[str, str] = {}
    dated_unix_s: float | None = None
    confidence: float | None = None
    supersedes: tuple[str, ...] = ()


async def ingest(
    paths: Iterable[Path],
    *,
    collection: str,
    embedder: Embedder,
    store: DocumentStore,
    given: Given | None = None,
    base: Path | None = None,
    prune: bool = False,
    settings: RetrievalSettings | None = None,
    rules: Rules | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
    finishing: bool = True,
) -> IngestReport:
    """Read what is under `paths` into `collection`, several documents side by side.

    `given` wins over what a document says of itself, which wins over the detected `lang`. `base`: documents are named by their path relative to
    it (so that the same folder elsewhere gives the same names); without it by their absolute path. `prune`: also remove documents whose file is
    gone. `settings`: bounds of a file, size of a passage, how many are read at once. `rules`: what the domain knows of its documents. `finishing`
    false: others are at it too, and somebody calls `finish` after all.
    Raises OtherEmbedder where the collection's vectors are another's; StoreDown where the store or the embedder cannot be reached: documents stored
    before that stay, and the next run goes on there; SettingsError where OCR is set and not installed. May be cancelled at any time: a document is
    stored whole or not at all.
    """
    began_ns = time.perf_counter_ns()
    base = None if base is None else await asyncio.to_thread(base.resolve)
    found = await asyncio.to_thread(walk, list(paths), by_suffix().keys())
    report = IngestReport(skipped=found.skipped, failed=found.failed, pruned=prune)
    settings = settings or RetrievalSettings.model_validate({})
    if settings.ocr != "off":
        await asyncio.to_thread(ocr.check, settings.ocr_languages)
    has = await store.fingerprint(collection)
    if has not in ("", embedder.fingerprint, f">{embedder.fingerprint}"):
        raise OtherEmbedder(collection, has, embedder.fingerprint)
    job = _Job(
        collection, given or Given(), base, chunk.Size(settings.passage_tokens, settings.passage_overlap), embedder, store, _bounds(settings),
        settings.ingest_patience_s, settings.keep_files, report, rules, _Told(progress, found.sizes),
        _Tokens(embedder, settings.ingest_patience_s),
    )  # fmt: skip
    async with contextlib.AsyncExitStack() as stack:
        workers = min(settings.ingest_workers or len(os.sched_getaffinity(0)), max(1, len(found.files)))
        loaders = [await stack.enter_async_context(Loader(job.bounds)) for _ in range(workers)]
        # Two documents for each: while the embedder counts the tokens of one, the next is read.
        steps = bulk.Steps([partial(job.read, loader) for loader in loaders for _ in range(2)], job.embed, job.write, job.failed)
        await bulk.run(found.files, steps)
    if finishing:
        await finish(report, found.folders, collection, store, base)
    report.seconds = (time.perf_counter_ns() - began_ns) / 1e9
    return report


async def finish(report: IngestReport, folders: Sequence[Path], collection: str, store: DocumentStore, base: Path | None) -> None:
    """What comes after all documents: those whose file is gone (removed where `report.pruned` says so), indexes, and the report in order."""
    documents = await store.list_documents(collection)
    looked_at = [(source, gone) async for source, gone in _vanished(folders, documents, base)]
    report.vanished = [source for source, gone in looked_at if gone is True]
    # A disk that is not mounted must not empty a collection.
    for folder, count in Counter(gone for _, gone in looked_at if isinstance(gone, Path)).items():
        why = f"the folder is empty, and {count} documents of it stay: is its disk mounted? If they are to go, remove it, or put a file into it"
        (report.failed if report.pruned else report.notes).append((shown(folder), why))
    if report.pruned:
        for source in report.vanished:
            await store.delete_document(collection, source)
    if report.stored or report.pruned:
        await store.build_indexes(collection)
    report.notes += _superseding_nobody(documents, set(report.stored), base)
    report.sort()


def _bounds(settings: RetrievalSettings) -> Bounds:
    return Bounds(
        max_bytes=settings.max_file_mib << 20, max_pages=settings.max_pages, seconds=settings.load_seconds,
        memory_bytes=settings.load_memory_mib << 20, ocr=settings.ocr, ocr_languages=settings.ocr_languages,
    )


class _Told:
    """Counts what is done, and tells it."""

    def __init__(self, progress: Callable[[Progress], None], sizes: Mapping[Path, int]) -> None:
        self._progress = progress
        self._sizes = sizes
        self._now = Progress(0, len(sizes), "", "reading", total_bytes=sum(sizes.values()))

    def begun(self, path: Path) -> None:
        self._tell(path, "reading")

    def embedded(self, passages: int) -> None:
        self._now = msgspec.structs.replace(self._now, passages=self._now.passages + passages, step="embedding")
        self._progress(self._now)

    def ended(self, path: Path, step: Step) -> None:
        now = self._now
        self._now = msgspec.structs.replace(now, done=now.done + 1, done_bytes=now.done_bytes + self._sizes.get(path, 0))
        self._tell(path, step)

    def _tell(self, path: Path, step: Step) -> None:
        self._now = msgspec.structs.replace(self._now, path=str(path), step=step)
        self._progress(self._now)


class _Tokens:
    """Counts as the embedder does. An embedder at work answers after its running batch, so it is not asked twice about the empty text, which every
    document asks for."""

    def __init__(self, embedder: Embedder, patience_s: float) -> None:
        self._embedder = embedder
        self._patience_s = patience_s
        self._empty: int | None = None

    async def __call__(self, texts: Sequence[str]) -> list[int]:
        if self._empty is None:
            (self._empty,) = await self._count([""])
        counts = iter(await self._count([text for text in texts if text]))
        return [next(counts) if text else self._empty for text in texts]

    async def _count(self, texts: list[str]) -> list[int]:
        return await bulk.patiently(lambda: self._embedder.count_tokens(texts), self._patience_s) if texts else []


@dataclass(frozen=True, slots=True)
class _Job:
    """What all documents of one ingest share, and the steps that each takes. They raise BadRequest for what is wrong with the document, and
    StoreDown where a part stays down."""

    collection: str
    given: Given
    base: Path | None
    size: chunk.Size
    embedder: Embedder
    store: DocumentStore
    bounds: Bounds
    patience_s: float
    keep_files: bool
    report: IngestReport
    rules: Rules | None
    told: _Told
    tokens: _Tokens

    async def read(self, loader: Loader, path: Path) -> bulk.Ready | None:
        """The document with its passages; None where it is stored already as it would be now."""
        self.told.begun(path)
        source = _source(path, self.base)
        size_bytes, content_sha256 = await asyncio.to_thread(_digest, path, self.bounds.max_bytes)
        drawable = self.keep_files and path.suffix.lower() in picture.SUFFIXES
        kept = drawable and size_bytes <= picture.MOST_BYTES
        sha256 = self._sha256(content_sha256, kept)
        if await self._patiently(lambda: self.store.document_sha(self.collection, source)) == sha256:
            self._unchanged(path)
            return None
        loaded = await loader.load(str(path))
        loaded = msgspec.structs.replace(loaded, title=loaded.title[:TITLE_CHARS])
        if self.rules is not None:
            loaded = structure.apply(loaded, self.rules)
        passages = await chunk.chunk(loaded, self.tokens, self.size)
        if not passages:  # whatever the loader took for a block
            raise DocumentUnreadable("The document holds no text.")
        document = Document(
            collection=self.collection, source=source, title=loaded.title, sha256=sha256, size_bytes=size_bytes,
            tags={**_language(passages), **loaded.tags, **self.given.tags},
            dated_unix_s=_or(self.given.dated_unix_s, loaded.dated_unix_s), confidence=_or(self.given.confidence, _or(loaded.confidence, 1.0)),
            supersedes=self._supersedes(source, path, loaded), fingerprint=self.embedder.fingerprint,
        )  # fmt: skip
        texts = [embedded_text(loaded.title, passage) for passage in passages]
        too_large = f"The file is larger than {picture.MOST_BYTES >> 20} MiB and is not kept: its pages cannot be shown."
        notes = [*loaded.notes, too_large] if drawable and not kept else loaded.notes
        passages = await asyncio.to_thread(_with_words, passages, texts)
        return bulk.Ready(path, document, passages, texts, notes, content_sha256 if kept else None)

    async def embed(self, texts: list[str]) -> Vectors:
        vectors = await self._patiently(lambda: self.embedder.embed(texts, "passage"))
        self.told.embedded(len(texts))
        return vectors

    async def write(self, ready: bulk.Ready, vectors: Vectors) -> None:
        """Store the document, unless somebody did meanwhile: another ingest, or a try of this one whose answer got lost."""
        path, document = str(ready.path), ready.document
        tries = 0

        async def replace() -> Replaced | None:
            nonlocal tries
            tries += 1
            if await self.store.document_sha(self.collection, document.source) == document.sha256:
                return None
            file = await asyncio.to_thread(_bytes, ready.path, ready.content_sha256) if ready.content_sha256 else None
            return await self.store.replace_document(document, ready.passages, vectors, file=file)

        replaced = await self._patiently(replace)
        if replaced is None and tries == 1:
            self._unchanged(ready.path)
            return
        self.report.notes.extend((path, note) for note in [*ready.notes, *(replaced.notes if replaced else [])])
        self.report.stored.append(path)
        self.report.passages += len(ready.passages)
        self.told.ended(ready.path, "stored")

    def failed(self, path: Path, error: BadRequest) -> None:
        self.report.failed.append((str(path), f"{error.message} {error.hint or ''}".strip()))
        self.told.ended(path, "failed")

    def _unchanged(self, path: Path) -> None:
        self.report.unchanged.append(str(path))
        self.told.ended(path, "unchanged")

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        return await bulk.patiently(call, self.patience_s)

    def _supersedes(self, source: str, path: Path, loaded: Loaded) -> tuple[str, ...]:
        """Sources of the documents whose place this one takes. It never takes its own: what is given stands for all documents."""
        named = self.given.supersedes or loaded.supersedes
        folder = Path.cwd() if self.given.supersedes else path.parent
        return tuple(dict.fromkeys(name for one in named if (name := _named(one, self.base, folder)) != source))

    def _sha256(self, content_sha256: str, kept: bool) -> str:
        """Of everything that decides what is stored."""
        versions = (
            LOADERS_VERSION, chunk.VERSION, self.size.tokens, self.size.overlap, WORDS_VERSION, kept,
            *((self.bounds.ocr, self.bounds.ocr_languages) if self.bounds.ocr != "off" else ()),
            *((self.rules.model_dump(),) if self.rules is not None else ()),
            *((self.given.dated_unix_s, self.given.confidence, self.given.supersedes) if self.given != Given(self.given.tags) else ()),
        )  # fmt: skip
        # Python's own JSON: it writes a lone surrogate, which a command line's broken bytes become, as an escape.
        return hashlib.sha256(json.dumps([content_sha256, versions, sorted(self.given.tags.items())]).encode()).hexdigest()


def _or(first: T | None, second: T) -> T:
    return second if first is None else first


def embedded_text(title: str, passage: NewPassage) -> str:
    """What the embedder reads: a passage alone often does not say what it is about, its headings do."""
    return "\n".join(filter(None, (" > ".join(filter(None, (title, passage.heading))), passage.text)))


def _source(path: Path, base: Path | None) -> str:
    if base is None:
        return str(path)
    try:
        return path.relative_to(base).as_posix()
    except ValueError:
        raise DocumentUnreadable(f"The file is not under the base folder {base}.", hint="Name another base, or none.") from None


def _named(name: str, base: Path | None, folder: Path) -> str:
    """The source that a path means: below the base where there is one, else from the folder. An address stays what it is."""
    return name if "://" in name else _source(Path(os.path.normpath((base or folder) / name)), base)


def _superseding_nobody(documents: Sequence[Document], stored: set[str], base: Path | None) -> list[tuple[str, str]]:
    """A note for each name that no document has: perhaps it is misspelt."""
    known = {document.source for document in documents}
    return [
        (path, f"It supersedes {name}, which is not in the collection.")
        for document in documents if (path := str((base or Path()) / document.source)) in stored
        for name in document.supersedes if name not in known
    ]  # fmt: skip


def _digest(path: Path, max_bytes: int) -> tuple[int, str]:
    """Size and hex SHA-256. Raises DocumentUnreadable."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > max_bytes:
                hint = "Split it, or raise retrieval.max_file_mib."
                raise DocumentUnreadable(f"The file has {size / 2**20:.0f} MiB, more than {max_bytes / 2**20:.0f} MiB.", hint=hint)
            return size, hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise DocumentUnreadable(f"The file cannot be read: {why}.", hint="Check its permissions.") from None


def _with_words(passages: Sequence[NewPassage], texts: Sequence[str]) -> list[NewPassage]:
    """A passage is found by the words that the embedder reads for it: of its title and headings, too."""
    return [msgspec.structs.replace(passage, words=words(text)) for passage, text in zip(passages, texts, strict=True)]


def _bytes(path: Path, sha256: str) -> bytes:
    """The file as it was when it was read. Raises DocumentUnreadable where it is another one now: its passages would stand elsewhere in it."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DocumentUnreadable(f"The file cannot be read: {(error.strerror or str(error)).lower()}.") from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise DocumentUnreadable("The file changed while it was read.", hint="Ingest it again.")
    return content


def _language(passages: Sequence[NewPassage]) -> dict[str, str]:
    found = language.detect("\n".join(passage.text for passage in passages[:50]))
    return {"lang": found} if found else {}


async def _vanished(folders: Sequence[Path], documents: Sequence[Document], base: Path | None) -> AsyncIterator[tuple[str, bool | Path]]:
    """Documents that were read from one of these folders and whose file is not there, with what `_is_gone` says of it."""
    for document in documents:
        path = Path(document.source) if base is None else base / document.source
        if path.is_absolute() and any(path.is_relative_to(folder) for folder in folders) and (gone := await asyncio.to_thread(_is_gone, path)):
            yield document.source, gone


def _is_gone(path: Path) -> bool | Path:
    """Whether a file is certainly gone: one that cannot be looked at is not. Where only an empty folder says so, that folder."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        try:
            folder = next(parent for parent in path.parents if parent.is_dir())  # the root is one
            with os.scandir(folder) as entries:
                return folder if next(entries, None) is None else True
        except OSError:
            return False
    except OSError:
        return False
    return False
