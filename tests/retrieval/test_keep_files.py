"""Ingest keeps the files whose pages can be drawn."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tidegate.retrieval import picture
from tidegate.retrieval.ingest import ingest
from tidegate.retrieval.settings import RetrievalSettings
from tidegate.stores.systems.memory import Memory

from .test_ingest import Embedder

BENEFITS = Path(__file__).parents[2] / "examples" / "documents" / "benefit-table.pdf"


async def test_ingest_keeps_the_files_that_can_be_drawn(tmp_path: Path) -> None:
    """A PDF's bytes as they are, and no others; where files are not to be kept any more, the next ingest forgets them."""
    (tmp_path / "a.PDF").write_bytes(BENEFITS.read_bytes())
    (tmp_path / "a.md").write_text("# Claims\n\nReport a loss within 14 days.\n")
    store = Memory()
    kept: dict[str, list[str | None]] = {}
    for keep in (True, False, True):
        settings = RetrievalSettings.model_validate({"keep_files": keep})
        await ingest([tmp_path], collection="c", embedder=Embedder(), store=store, base=tmp_path, settings=settings)
        for source in ("a.PDF", "a.md"):
            ids = store._documents["c", source].passages
            kept.setdefault(source, []).extend({passage.file_sha256 for passage in await store.stored_passages("c", list(ids))})
    sha256 = hashlib.sha256(BENEFITS.read_bytes()).hexdigest()
    assert kept == {"a.PDF": [sha256, None, sha256], "a.md": [None, None, None]}
    assert await store.read_file(sha256) == BENEFITS.read_bytes()


async def test_a_file_that_is_too_large_to_be_kept_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ingested, with a note, and its bytes are not in the store."""
    (tmp_path / "a.pdf").write_bytes(BENEFITS.read_bytes())
    monkeypatch.setattr(picture, "MOST_BYTES", 1 << 10)
    store = Memory()
    report = await ingest([tmp_path], collection="c", embedder=Embedder(), store=store, base=tmp_path)
    assert (len(report.stored), [note for _, note in report.notes if "is not kept" in note]) == (1, [
        "The file is larger than 0 MiB and is not kept: its pages cannot be shown."
    ])
    assert await store.read_file(hashlib.sha256(BENEFITS.read_bytes()).hexdigest()) is None
