"""Ingest: what is stored, left alone, refused and reported, and that a bad file stops nobody else."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from reportlab.pdfgen.canvas import Canvas

from tidegate.core.errors import OtherEmbedder, SettingsError, StoreDown
from tidegate.core.ports import Vectors
from tidegate.retrieval import bulk
from tidegate.retrieval.ingest import Given, IngestReport, Progress, ingest
from tidegate.retrieval.reembed import reembed
from tidegate.retrieval.search import Search
from tidegate.retrieval.settings import RetrievalSettings
from tidegate.retrieval.structure import Rules
from tidegate.stores.systems.memory import Memory

COLLECTION = "policies"
PDFS = Path(__file__).parents[3] / "shared" / "data" / "pdf"


class Embedder:
    """Any text gets a vector of its own; notes what it was given. `down_after`: texts after which it cannot be reached."""

    model = "test-model"
    dimensions = 384
    fingerprint = "test-model/1"

    def __init__(self) -> None:
        self.embedded: list[str] = []
        self.down_after = 1_000_000

    async def embed(self, texts: Sequence[str], kind: Literal["query", "passage"]) -> Vectors:
        self.embedded.extend(texts)
        if len(self.embedded) > self.down_after:
            raise StoreDown("The embedder cannot be reached.")
        rows = [np.random.default_rng(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])).normal(size=384) for text in texts]
        return np.array([row / np.linalg.norm(row) for row in rows], np.float32)

    async def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return [3 + len(text.split()) for text in texts]


def settings(**changed: Any) -> RetrievalSettings:
    """Two workers, and no patience: what is down here stays down."""
    return RetrievalSettings(**{"ingest_workers": 2, "ingest_patience_s": 0} | changed)


@pytest.fixture
def embedder() -> Embedder:
    return Embedder()


@pytest.fixture
def store() -> Memory:
    return Memory()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    (folder / "sub").mkdir(parents=True)
    (folder / "claims.md").write_text("---\ntags:\n  product: motor\n---\n# Claims\n\nReport a loss within 14 days of it.\n")
    (folder / "sub" / "car.txt").write_text("请在 48 小时内报案。", encoding="gb18030")
    return folder


Run = Callable[..., Awaitable[IngestReport]]


@pytest.fixture
def run(embedder: Embedder, store: Memory) -> Run:
    async def run(*paths: Path, **options: Any) -> IngestReport:
        options["settings"] = options.get("settings") or settings()
        return await ingest(paths, collection=COLLECTION, embedder=embedder, store=store, **options)

    return run


async def sources(store: Memory) -> list[str]:
    return [document.source for document in await store.list_documents(COLLECTION)]


def names(pairs: list[tuple[str, str]]) -> list[str]:
    return [Path(path).name for path, _ in pairs]


async def test_a_folder_becomes_documents(run: Run, store: Memory, folder: Path) -> None:
    """Every readable file under a folder is a document with its title, its tags and the language it is in."""
    report = await run(folder)
    documents = {Path(document.source).name: document for document in await store.list_documents(COLLECTION)}
    assert documents["claims.md"].title == "Claims"
    assert documents["claims.md"].tags == {"lang": "en", "product": "motor"}
    assert documents["car.txt"].tags == {"lang": "zh"}
    assert (len(report.stored), report.passages, report.failed) == (2, 2, [])


async def test_what_did_not_change_is_left_alone(run: Run, embedder: Embedder, folder: Path) -> None:
    """A second run embeds nothing."""
    await run(folder)
    before = len(embedder.embedded)
    report = await run(folder)
    assert (len(report.unchanged), report.stored, len(embedder.embedded)) == (2, [], before)


@pytest.mark.parametrize("change", ["bytes", "tags", "settings", "rules"])
async def test_what_decides_the_passages_makes_a_document_new(run: Run, embedder: Embedder, folder: Path, change: str) -> None:
    """Other bytes, tags, another passage size or other rules: the document is stored again."""
    file = folder / "claims.md"
    await run(file)
    options: dict[str, Any] = {}
    if change == "bytes":
        file.write_text(file.read_text() + "\nAnd more of it.\n")
    elif change == "tags":
        options["given"] = Given(tags={"year": "2026"})
    elif change == "rules":
        options["rules"] = Rules(skip=["index"])
    else:
        options["settings"] = settings(passage_tokens=100)
    assert len((await run(file, **options)).stored) == 1


async def test_tags_of_the_command_win(run: Run, store: Memory, folder: Path) -> None:
    """A tag given by hand wins over the document's own."""
    await run(folder / "claims.md", given=Given(tags={"product": "all", "lang": "xx"}))
    (document,) = await store.list_documents(COLLECTION)
    assert document.tags == {"product": "all", "lang": "xx"}


async def test_a_bad_file_stops_nobody(run: Run, store: Memory, folder: Path) -> None:
    """A broken file is reported with its reason, the rest is stored, and a suffix that nobody reads is skipped with the known ones."""
    (folder / "broken.pdf").write_bytes(b"%PDF-1.7 and then nothing")
    (folder / "photo.pdf").write_bytes(b"\xff\xd8\xff\xe0")
    (folder / "slides.pptx").write_bytes(b"PK")
    report = await run(folder)
    assert len(report.stored) == 2
    assert names(report.failed) == ["broken.pdf", "photo.pdf"]
    assert "JPEG" in report.failed[1][1]
    assert names(report.skipped) == ["slides.pptx"]
    assert ".pdf" in report.skipped[0][1]


async def test_a_document_that_broke_keeps_its_old_passages(run: Run, store: Memory, folder: Path) -> None:
    """What was readable yesterday is still found today."""
    await run(folder)
    (folder / "claims.md").write_bytes(b"")
    report = await run(folder)
    assert names(report.failed) == ["claims.md"]
    assert len(await sources(store)) == 2


async def test_what_a_loader_left_out_is_in_the_report(run: Run, folder: Path) -> None:
    """The notes of a document come with its path."""
    (folder / "claims.md").write_text("text\n\n<div>hidden</div>\n")
    report = await run(folder)
    assert [(Path(path).name, "HTML" in note) for path, note in report.notes] == [("claims.md", True)]


async def test_a_file_over_the_bound_is_refused(run: Run, folder: Path) -> None:
    """A file larger than the setting is refused with both sizes, and is not read."""
    (folder / "claims.md").write_bytes(b"a" * (1 << 20) + b"b")
    report = await run(folder, settings=settings(max_file_mib=1))
    assert "retrieval.max_file_mib" in report.failed[0][1]


async def test_a_gigabyte_in_one_line_is_refused_unread(run: Run, folder: Path) -> None:
    """The size is looked at before the file is: the one file costs nothing, and the rest is stored."""
    with (folder / "line.csv").open("wb") as file:
        file.truncate(1 << 30)
    report = await run(folder)
    assert [(Path(path).name, "more than 64 MiB" in why) for path, why in report.failed] == [("line.csv", True)]
    assert len(report.stored) == 2


async def test_rules_are_obeyed_and_noted(run: Run, folder: Path) -> None:
    """A section that the domain skips makes no passage, and the report says so."""
    (folder / "claims.md").write_text("# Claims\n\nReport it.\n\n## Index\n\nwords\n")
    report = await run(folder / "claims.md", rules=Rules(skip=["index"]))
    assert (report.passages, [note for _, note in report.notes]) == (1, ["The section 'Index' was skipped (1 blocks), as structure.toml says."])


async def test_ocr_that_is_not_installed_ends_the_run_before_it_begins(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read, and the error names the program."""
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SettingsError, match="no such program"):
        await run(folder, settings=settings(ocr="tesseract"))


async def test_hidden_files_are_skipped_unless_named(run: Run, folder: Path) -> None:
    """Dot files and dot folders are left alone; a file that is named is read."""
    (folder / ".git").mkdir()
    (folder / ".git" / "x.md").write_text("text")
    (folder / ".y.md").write_text("text")
    assert len((await run(folder)).stored) == 2
    assert len((await run(folder / ".y.md")).stored) == 1


async def test_links_are_followed_once(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link to a parent folder is looked into once, and a file reached twice is one document."""
    (folder / "sub" / "loop").symlink_to(folder)
    (folder / "again.md").symlink_to(folder / "claims.md")
    scandir, looked = os.scandir, []
    monkeypatch.setattr(os, "scandir", lambda path: looked.append(str(path)) or scandir(path))
    report = await run(folder, folder / "claims.md")
    assert len(report.stored) == 2
    assert len(looked) == 3  # the folder, sub, and the loop, where it is seen to be the folder again


async def test_what_is_no_file_is_skipped(run: Run, folder: Path) -> None:
    """A pipe would hang a reader: it is not opened."""
    os.mkfifo(folder / "pipe.txt")
    report = await run(folder)
    assert report.skipped == [(str(folder / "pipe.txt"), "not a regular file")]


async def test_a_path_that_is_not_there_is_reported(run: Run, folder: Path) -> None:
    """A mistyped path is a failure, and the others are read."""
    report = await run(folder / "nosuch", folder)
    assert report.failed == [(str(folder / "nosuch"), "there is no such file or folder")]
    assert len(report.stored) == 2


async def test_a_folder_that_may_not_be_read_is_reported(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without permission is named; its neighbours are read. (Root may read everything, so the refusal is played.)"""
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("sub"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    report = await run(folder)
    assert report.failed == [(str(folder / "sub"), "folder not read: permission denied")]
    assert len(report.stored) == 1


async def test_documents_whose_file_is_gone_are_reported_and_pruned_on_request(run: Run, store: Memory, folder: Path) -> None:
    """A file that vanished stays searchable until `prune`; a document of another folder is none of our business."""
    other = folder.parent / "other.md"
    other.write_text("text")
    await run(folder, other)
    (folder / "claims.md").unlink()
    other.unlink()
    report = await run(folder)
    assert report.vanished == [str(folder / "claims.md")]
    assert len(await sources(store)) == 3
    assert (await run(folder, prune=True)).pruned
    assert sorted(Path(source).name for source in await sources(store)) == ["car.txt", "other.md"]


async def test_a_file_that_cannot_be_looked_at_is_not_gone(run: Run, store: Memory, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A permission problem must not empty a collection."""
    await run(folder)
    (folder / "claims.md").unlink()

    def refuse(path: Path) -> os.stat_result:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "lstat", refuse)
    report = await run(folder, prune=True)
    assert report.vanished == []
    assert len(await sources(store)) == 2


async def test_a_folder_that_is_empty_prunes_nothing(run: Run, store: Memory, folder: Path) -> None:
    """It may be where a disk is not mounted: that is said, and whoever means it removes the folder."""
    await run(folder)
    (folder / "sub" / "car.txt").unlink()
    report = await run(folder, prune=True)
    assert [(path, "is its disk mounted" in why) for path, why in report.failed] == [(str(folder / "sub"), True)]
    assert (report.vanished, len(await sources(store))) == ([], 2)
    assert "1 documents of it stay" in (await run(folder)).notes[0][1]
    (folder / "sub").rmdir()
    assert (await run(folder, prune=True)).vanished == [str(folder / "sub" / "car.txt")]


async def test_names_may_be_relative_to_a_base(run: Run, store: Memory, folder: Path) -> None:
    """With a base the same folder elsewhere gives the same names, and gone files are still found out."""
    await run(folder, base=folder)
    assert await sources(store) == ["claims.md", "sub/car.txt"]
    (folder / "claims.md").unlink()
    assert (await run(folder, base=folder)).vanished == ["claims.md"]
    outside = folder.parent / "other.md"
    outside.write_text("text")
    assert "not under the base" in (await run(outside, base=folder)).failed[0][1]


async def test_the_embedder_reads_headings_and_the_store_keeps_text(run: Run, embedder: Embedder, folder: Path) -> None:
    """A passage is embedded with its title and headings: alone it often does not say what it is about."""
    (folder / "claims.md").write_text("# Claims\n\n## Deadline\n\nWithin 14 days of it.\n")
    await run(folder / "claims.md")
    assert embedder.embedded == ["Claims > Deadline\nWithin 14 days of it."]


async def test_a_long_document_is_embedded_in_batches(run: Run, embedder: Embedder, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All passages of a document are stored with their vectors, whatever the batch."""
    monkeypatch.setattr(bulk, "EMBED_BATCH", 3)
    (folder / "claims.md").write_text("".join(f"## H{n}\n\nText of section {n}.\n\n" for n in range(10)))
    said: list[Progress] = []
    report = await run(folder / "claims.md", progress=said.append)
    assert report.passages == len(embedder.embedded) == 10
    assert [one.passages for one in said if one.step == "embedding"] == [3, 6, 9, 10]


async def test_progress_goes_from_nothing_to_all(run: Run, folder: Path) -> None:
    """The last word says that all documents are done."""
    said: list[Progress] = []
    await run(folder, progress=said.append)
    assert [one.done for one in said] == sorted(one.done for one in said)
    assert (said[0].done, said[-1].done, said[-1].total, said[-1].step) == (0, 2, 2, "stored")


async def test_a_store_that_is_down_ends_the_run_and_the_next_goes_on(run: Run, embedder: Embedder, store: Memory, folder: Path) -> None:
    """What was stored stays stored; the next run does the rest only."""
    await run(folder / "claims.md")
    embedder.down_after = 1
    with pytest.raises(StoreDown):
        await run(folder)
    embedder.down_after = 1_000_000
    report = await run(folder)
    assert (len(report.unchanged), len(report.stored)) == (1, 1)


async def test_a_name_that_is_not_utf8_is_reported_and_stops_nobody(run: Run, folder: Path) -> None:
    """A file whose name no database can hold fails alone, with a reason that can be printed."""
    inner = folder / os.fsdecode(b"f\xff")
    inner.mkdir()
    for path in (folder / os.fsdecode(b"bad\xff.md"), inner / "inner.md"):
        path.write_text("hello")
    report = await run(folder)
    assert len(report.stored) == 2
    assert [why for _, why in report.failed] == ["its name is not UTF-8: rename it, for documents are known by their names"] * 2
    assert all(path.encode() for path, _ in report.failed)


@pytest.mark.parametrize(
    "text", ["```\n\n```\n", "# \n", "# Only a heading", "<!-- x -->", "![](x.png)", "|a|\n|-|\n", "\u200b\u200b", "\f", "---", "`" * 5000]
)
async def test_a_document_without_a_word_stops_nobody(run: Run, folder: Path, text: str) -> None:
    """Whatever its marks, a document either has passages or is reported; the others are read."""
    (folder / "none.md").write_text(text)
    report = await run(folder)
    assert len(report.stored) + len(report.failed) == 3
    assert all("none.md" in path for path, _ in report.failed)


# -- what a document says of itself, and what is said of it

MARCH, APRIL = 1_774_915_200.0, 1_775_001_600.0  # the last day of March 2026, and the first of April


async def test_a_document_is_dated_trusted_and_takes_the_place_of_another(run: Run, store: Memory, folder: Path) -> None:
    """As its front matter says; a name there is a path from its own folder, as in a link."""
    (folder / "sub" / "new.md").write_text("---\ndate: 2026-03-31\nconfidence: 0.5\nsupersedes: ../claims.md\n---\nReport at once.\n")
    await run(folder)
    found = {Path(one.source).name: one for one in await store.list_documents(COLLECTION)}
    assert (found["new.md"].dated_unix_s, found["new.md"].confidence) == (MARCH, 0.5)
    assert found["claims.md"].superseded_by == str(folder / "sub" / "new.md")
    assert found["claims.md"].dated_unix_s == found["claims.md"].ingested_unix_s
    assert found["car.txt"].superseded_by is None


async def test_what_is_given_wins_over_what_a_document_says(run: Run, store: Memory, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Date, confidence and what is superseded; a path that is given is one from here, and no document takes its own place."""
    monkeypatch.chdir(folder)
    (folder / "claims.md").write_text("---\ndate: 2026-03-31\nconfidence: 0.5\nsupersedes: other.md\n---\nText.\n")
    await run(folder, given=Given(dated_unix_s=APRIL, confidence=0.0, supersedes=("sub/car.txt",)))
    found = {Path(one.source).name: one for one in await store.list_documents(COLLECTION)}
    claims = found["claims.md"]
    assert (claims.dated_unix_s, claims.confidence, claims.supersedes) == (APRIL, 0.0, (str(folder / "sub" / "car.txt"),))
    assert found["car.txt"].supersedes == ()


async def test_with_a_base_names_are_below_it(run: Run, store: Memory, folder: Path) -> None:
    """As the documents themselves are named; an address stays as it is."""
    (folder / "sub" / "new.md").write_text("---\nsupersedes: [claims.md, 'https://x.example/a']\n---\nText.\n")
    report = await run(folder, base=folder)
    found = {one.source: one for one in await store.list_documents(COLLECTION)}
    assert found["sub/new.md"].supersedes == ("claims.md", "https://x.example/a")
    assert found["claims.md"].superseded_by == "sub/new.md"
    assert [note for _, note in report.notes] == ["It supersedes https://x.example/a, which is not in the collection."]


async def test_a_date_that_is_none_costs_its_document_alone(run: Run, folder: Path) -> None:
    """It is refused with key and line, and not dated today."""
    (folder / "bad.md").write_text("---\ntitle: x\ndate: soon\n---\nText.\n")
    report = await run(folder)
    assert [(Path(path).name, "line 3: `date`" in why) for path, why in report.failed] == [("bad.md", True)]
    assert len(report.stored) == 2


@pytest.mark.parametrize("given", [Given(dated_unix_s=MARCH), Given(confidence=0.5), Given(supersedes=("x.md",))])
async def test_what_is_given_makes_a_document_new_once(run: Run, folder: Path, given: Given) -> None:
    """Stored again where it is given for the first time, and left alone after that."""
    file = folder / "claims.md"
    await run(file)
    assert [len((await run(file, given=given)).stored) for _ in range(2)] == [1, 0]


async def test_a_lone_surrogate_given_as_a_tag_stops_nobody(run: Run, store: Memory, folder: Path) -> None:
    """A command line's bytes that are no UTF-8 come as surrogates: the documents are stored, or named with a reason."""
    report = await run(folder, given=Given(tags={"team": "x\udcff"}))
    assert len(report.stored) + len(report.failed) == 2


async def test_progress_counts_documents_and_bytes(run: Run, folder: Path) -> None:
    """Of all that were found, failed ones too."""
    (folder / "bad.pdf").write_bytes(b"no PDF")
    said: list[Progress] = []
    await run(folder, progress=said.append)
    size = sum(file.stat().st_size for file in (folder / "claims.md", folder / "sub" / "car.txt", folder / "bad.pdf"))
    assert (said[-1].done, said[-1].total, said[-1].done_bytes, said[-1].total_bytes) == (3, 3, size, size)
    assert said[-1].passages == 2


async def test_a_file_that_changes_while_it_is_read_is_not_kept_beside_other_passages(
    run: Run, embedder: Embedder, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kept PDF is the one that its passages were read from: else the document is refused this time."""
    file = folder / "a.pdf"
    canvas = Canvas(str(file))
    canvas.drawString(72, 700, "Report a loss within 14 days of it.")
    canvas.save()
    embed = embedder.embed

    async def change_first(texts: Sequence[str], kind: Literal["query", "passage"]) -> Vectors:
        file.write_bytes(file.read_bytes() + b"\n")
        return await embed(texts, kind)

    monkeypatch.setattr(embedder, "embed", change_first)
    report = await run(file)
    assert [why.split(".")[0] for _, why in report.failed] == ["The file changed while it was read"]
    monkeypatch.undo()
    assert len((await run(file)).stored) == 1


async def test_a_part_that_comes_back_within_the_patience_is_not_noticed(run: Run, embedder: Embedder, folder: Path) -> None:
    """A restart of the embedder in the middle of an ingest costs nothing."""
    times = 0

    class Restarting(Embedder):
        async def embed(self, texts: Sequence[str], kind: Literal["query", "passage"]) -> Vectors:
            nonlocal times
            times += 1
            if times < 3:
                raise StoreDown("The embedder cannot be reached.")
            return await super().embed(texts, kind)

    embedder.__class__ = Restarting
    report = await run(folder, settings=settings(ingest_patience_s=60))
    assert (len(report.stored), report.failed) == (2, [])


async def test_what_another_ingest_stored_meanwhile_is_not_stored_again(run: Run, embedder: Embedder, store: Memory, folder: Path) -> None:
    """Two ingests of one folder at once: each document has one version, and each is somebody's."""
    one, other = await asyncio.gather(run(folder), run(folder))
    assert [document.version for document in await store.list_documents(COLLECTION)] == [1, 1]
    assert len(one.stored) + len(other.stored) == 2
    assert len(one.unchanged) + len(other.unchanged) == 2


# -- another embedder


async def test_a_collection_of_another_embedder_is_refused_before_anything_is_read(run: Run, embedder: Embedder, folder: Path) -> None:
    """The error names both and the way over."""
    await run(folder)
    before = len(embedder.embedded)
    embedder.fingerprint = "another/1"
    with pytest.raises(OtherEmbedder, match="test-model/1, and another/1 runs") as refused:
        await run(folder)
    assert f"--reembed --collection {COLLECTION}" in (refused.value.hint or "")
    assert len(embedder.embedded) == before


async def test_a_search_with_another_embedder_is_refused(run: Run, embedder: Embedder, store: Memory, folder: Path) -> None:
    """Its vector would find anything. Half way over it is refused too, and at the end it finds."""
    await run(folder)
    embedder.fingerprint = "another/1"
    search = Search(embedder, store, RetrievalSettings(collection=COLLECTION, rerank="off"))
    with pytest.raises(OtherEmbedder):
        await search.find("a loss")
    await store.unembedded(COLLECTION, embedder.fingerprint, 1)
    with pytest.raises(OtherEmbedder, match="not all of its documents"):
        await search.find("a loss")
    assert await reembed(COLLECTION, embedder=embedder, store=store) == 2
    assert (await search.find("a loss")).passages


async def test_all_is_embedded_anew_as_it_was_embedded_first(run: Run, embedder: Embedder, store: Memory, folder: Path) -> None:
    """The same texts, with title and headings; files need not be there. What an ingest finds after that is unchanged."""
    await run(folder)
    first, embedder.embedded = sorted(embedder.embedded), []
    embedder.fingerprint = "another/1"
    elsewhere = folder.parent / "elsewhere"
    os.rename(folder, elsewhere)
    said: list[tuple[int, str]] = []
    assert await reembed(COLLECTION, embedder=embedder, store=store, progress=lambda *one: said.append(one)) == 2
    assert (sorted(embedder.embedded), [done for done, _ in said]) == (first, [1, 2])
    os.rename(elsewhere, folder)
    assert len((await run(folder)).unchanged) == 2
    assert await reembed(COLLECTION, embedder=embedder, store=store) == 0


# -- bad input, many files at once


@pytest.mark.skipif(not PDFS.is_dir(), reason="no ../shared/data beside this checkout")
@pytest.mark.parametrize("kind", ["broken", "encrypted", "scan"])
async def test_real_bad_pdfs_are_stored_or_named(run: Run, store: Memory, kind: str) -> None:
    """All of a kind in one run: each is a document or has a reason, and none costs another anything."""
    report = await run(PDFS / kind)
    files = {os.path.join(place, name) for place, _, names in os.walk((PDFS / kind).resolve()) for name in names if name.endswith(".pdf")}
    failed = {path for path, why in report.failed if why}
    assert set(report.stored) | failed == files
    assert not set(report.stored) & failed
    assert len(await sources(store)) == len(report.stored)


async def test_bytes_that_are_no_text_are_named(run: Run, folder: Path) -> None:
    """A picture named .csv, and noise named .txt: each with its reason."""
    (folder / "photo.csv").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    (folder / "noise.txt").write_bytes(random.Random(1).randbytes(5000))
    report = await run(folder)
    assert sorted(names(report.failed)) == ["noise.txt", "photo.csv"]
    assert len(report.stored) == 2


async def test_the_same_text_in_two_files_is_two_documents(run: Run, store: Memory, folder: Path) -> None:
    """Duplicates stay apart, each with its name and passages of its own: which of them is meant is not for an ingest to say."""
    (folder / "copy.md").write_bytes((folder / "claims.md").read_bytes())
    report = await run(folder)
    assert (len(report.stored), report.passages) == (3, 3)
    assert len({one.sha256 for one in await store.list_documents(COLLECTION)}) == 2
