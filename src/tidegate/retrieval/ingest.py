"""Files and folders into a collection: changed documents only, one transaction each; a bad file is reported and the rest goes on."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from tidegate.core.document import Document, NewPassage
from tidegate.core.errors import BadRequest, DocumentUnreadable
from tidegate.core.ports import DocumentStore, Embedder, Vectors
from tidegate.retrieval import chunk, language, ocr, structure
from tidegate.retrieval.load import Loader
from tidegate.retrieval.load_child import by_suffix
from tidegate.retrieval.loaded import Bounds, Loaded
from tidegate.retrieval.settings import RetrievalSettings
from tidegate.retrieval.structure import Rules
from tidegate.retrieval.walk import walk

#: Raised by one when a loader makes other blocks of the same bytes than before.
LOADERS_VERSION = 2
#: Texts given to the embedder at once; it sorts and batches them itself.
EMBED_BATCH = 64
#: A title is shown in one line.
TITLE_CHARS = 200

Step = Literal["reading", "embedding", "stored", "unchanged", "failed"]


class Progress(msgspec.Struct, frozen=True):
    """Where the ingest stands: `done` of `total` documents; `path` is the one at hand; `passages` of it are embedded."""

    done: int
    total: int
    path: str
    step: Step
    passages: int = 0


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


async def ingest(
    paths: Iterable[Path],
    *,
    collection: str,
    embedder: Embedder,
    store: DocumentStore,
    tags: Mapping[str, str] | None = None,
    base: Path | None = None,
    prune: bool = False,
    settings: RetrievalSettings | None = None,
    rules: Rules | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
) -> IngestReport:
    """Read what is under `paths` into `collection`.

    `tags` win over a document's own, which win over the detected `lang`. `base`: documents are named by their path relative to it (so that
    the same folder elsewhere gives the same names); without it by their absolute path. `prune`: also remove documents whose file is gone.
    `settings`: bounds of a file, size of a passage. `rules`: what the domain knows of its documents.
    Raises StoreDown where the store or the embedder cannot be reached: documents stored before that stay, and the next run goes on there;
    SettingsError where OCR is set and not installed.
    """
    began_ns = time.perf_counter_ns()
    base = None if base is None else await asyncio.to_thread(base.resolve)
    found = await asyncio.to_thread(walk, list(paths), by_suffix().keys())
    report = IngestReport(skipped=found.skipped, failed=found.failed, pruned=prune)
    settings = settings or RetrievalSettings.model_validate({})
    if settings.ocr != "off":
        await asyncio.to_thread(ocr.check, settings.ocr_languages)
    size = chunk.Size(settings.passage_tokens, settings.passage_overlap)
    async with Loader(_bounds(settings)) as loader:
        job = _Job(collection, dict(tags or {}), base, size, embedder, store, loader, report, rules)
        for done, path in enumerate(found.files):
            said = Progress(done, len(found.files), str(path), "reading")
            progress(said)
            step = await job.document(path, said, progress)
            progress(Progress(done + 1, said.total, said.path, step))
    report.vanished = [source async for source in _vanished(found.folders, collection, base, store)]
    if prune:
        for source in report.vanished:
            await store.delete_document(collection, source)
    if report.stored or report.pruned:
        await store.build_indexes(collection)
    report.seconds = (time.perf_counter_ns() - began_ns) / 1e9
    return report


def _bounds(settings: RetrievalSettings) -> Bounds:
    return Bounds(
        max_bytes=settings.max_file_mib << 20, max_pages=settings.max_pages, seconds=settings.load_seconds,
        memory_bytes=settings.load_memory_mib << 20, ocr=settings.ocr, ocr_languages=settings.ocr_languages,
    )


@dataclass(frozen=True, slots=True)
class _Job:
    """What all documents of one ingest share."""

    collection: str
    tags: dict[str, str]
    base: Path | None
    size: chunk.Size
    embedder: Embedder
    store: DocumentStore
    loader: Loader
    report: IngestReport
    rules: Rules | None

    async def document(self, path: Path, said: Progress, progress: Callable[[Progress], None]) -> Step:
        """One document, from file to store. Never raises what the file can cause; raises StoreDown."""
        try:
            source = _source(path, self.base)
            size_bytes, content_sha256 = await asyncio.to_thread(_digest, path, self.loader.bounds.max_bytes)
            sha256 = self._sha256(content_sha256)
            if await self.store.document_sha(self.collection, source) == sha256:
                self.report.unchanged.append(str(path))
                return "unchanged"
            loaded = await self.loader.load(str(path))
            return await self._store(path, source, size_bytes, sha256, loaded, said, progress)
        except BadRequest as error:  # what is wrong with this document; the loader's words or the embedder's
            self.report.failed.append((str(path), f"{error.message} {error.hint or ''}".strip()))
            return "failed"

    async def _store(
        self, path: Path, source: str, size_bytes: int, sha256: str, loaded: Loaded, said: Progress, progress: Callable[[Progress], None]
    ) -> Step:
        loaded = msgspec.structs.replace(loaded, title=loaded.title[:TITLE_CHARS])
        if self.rules is not None:
            loaded = structure.apply(loaded, self.rules)
        passages = await chunk.chunk(loaded, self.embedder.count_tokens, self.size)
        if not passages:  # whatever the loader took for a block
            raise DocumentUnreadable("The document holds no text.")
        vectors = await self._embed(loaded.title, passages, said, progress)
        tags = {**_language(passages), **loaded.tags, **self.tags}
        document = Document(
            collection=self.collection, source=source, title=loaded.title, sha256=sha256, size_bytes=size_bytes, tags=tags
        )
        replaced = await self.store.replace_document(document, passages, vectors)
        self.report.notes.extend((str(path), note) for note in [*loaded.notes, *replaced.notes])
        self.report.stored.append(str(path))
        self.report.passages += len(passages)
        return "stored"

    def _sha256(self, content_sha256: str) -> str:
        """Of everything that decides what is stored."""
        versions = (
            LOADERS_VERSION, chunk.VERSION, self.size.tokens, self.size.overlap, self.embedder.model,
            *((self.loader.bounds.ocr, self.loader.bounds.ocr_languages) if self.loader.bounds.ocr != "off" else ()),
            *((self.rules.model_dump(),) if self.rules is not None else ()),
        )  # fmt: skip
        return hashlib.sha256(msgspec.json.encode([content_sha256, versions, sorted(self.tags.items())])).hexdigest()

    async def _embed(self, title: str, passages: Sequence[NewPassage], said: Progress, progress: Callable[[Progress], None]) -> Vectors:
        texts = [embedded_text(title, passage) for passage in passages]
        vectors = []
        for start in range(0, len(texts), EMBED_BATCH):
            progress(msgspec.structs.replace(said, step="embedding", passages=start))
            vectors.append(await self.embedder.embed(texts[start : start + EMBED_BATCH], "passage"))
        return np.concatenate(vectors)


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


def _language(passages: Sequence[NewPassage]) -> dict[str, str]:
    found = language.detect("\n".join(passage.text for passage in passages[:50]))
    return {"lang": found} if found else {}


async def _vanished(folders: Sequence[Path], collection: str, base: Path | None, store: DocumentStore) -> AsyncIterator[str]:
    """Documents that were read from one of these folders and whose file is certainly gone: one that cannot be looked at is not."""
    for document in await store.list_documents(collection):
        path = Path(document.source) if base is None else base / document.source
        if path.is_absolute() and any(path.is_relative_to(folder) for folder in folders) and await asyncio.to_thread(_is_gone, path):
            yield document.source


def _is_gone(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False
