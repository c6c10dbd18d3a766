"""What is Qdrant's own: a change that is not a transaction, words as sparse vectors, a server that is not there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from qdrant_client import models

from tidegate.core.document import NewPassage
from tidegate.core.errors import StoreDown
from tidegate.core.search import Filter
from tidegate.stores.settings import QdrantSettings
from tidegate.stores.systems.qdrant import Qdrant

from .test_documents import a_document, axis, texts


async def found(store: Qdrant, **options: Any) -> list[str]:
    return [passage.text for passage in (await store.search("c", axis(0)[0], 9, **options)).passages]


async def test_a_search_that_meets_a_change_looks_again(qdrant: Qdrant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the change ends while the first look is under way: the second look sees all of it."""
    await qdrant.replace_document(a_document(), texts("old"), axis(0))
    looks: list[str] = []
    find = qdrant._find

    async def found_meanwhile(*args: Any) -> Any:
        seen = await find(*args)
        if not looks:
            await qdrant.replace_document(a_document(sha256="2"), texts("new"), axis(0))
        looks.append(seen.passages[0].text)
        return seen

    monkeypatch.setattr(qdrant, "_find", found_meanwhile)
    assert await found(qdrant) == ["new"]
    assert looks == ["old", "new"]


async def test_of_a_change_that_broke_off_only_the_newer_is_given(qdrant: Qdrant, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that was killed between showing and removing leaves both; the next ingest of the document mends it."""
    await qdrant.replace_document(a_document(), texts("old", "gone"), axis(0, 1))
    change, broken = qdrant._change, True

    async def killed(name: str, operations: list[Any]) -> None:
        await change(name, [one for one in operations if not (broken and isinstance(one, models.DeleteOperation))])

    monkeypatch.setattr(qdrant, "_change", killed)
    await qdrant.replace_document(a_document(), texts("new"), axis(2))
    assert await found(qdrant) == ["new"]
    broken = False
    await qdrant.replace_document(a_document(), texts("newest"), axis(3))
    assert await found(qdrant) == ["newest"]
    assert (await qdrant._client.count(qdrant._named("c"))).count == 3  # the state, a head, a passage


async def test_what_is_written_is_hidden_until_it_is_whole(qdrant: Qdrant, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that is killed before the change left nothing that anybody sees, and the digest is the old one."""
    await qdrant.replace_document(a_document(), texts("old"), axis(0))

    async def killed(name: str, operations: list[Any]) -> None:
        raise StoreDown("killed")

    monkeypatch.setattr(qdrant, "_change", killed)
    with pytest.raises(StoreDown):
        await qdrant.replace_document(a_document(sha256="2"), texts("new"), axis(0))
    assert await found(qdrant) == ["old"]
    assert await qdrant.document_sha("c", "a.md") == "1"


async def test_words_are_found_with_their_coverage(qdrant: Qdrant) -> None:
    """The passage with both words first; a word that nobody has counts as the rarest."""
    passages = [NewPassage(text, words=text.split()) for text in ("red fish", "red", "blue", "grey")]
    await qdrant.replace_document(a_document(), passages, axis(1, 2, 3, 4))
    seen = await qdrant.search("c", axis(0)[0], 2, words=["red", "fish", "whale"])
    by_id = {passage.id: passage.text for passage in seen.passages}
    words = seen.legs[1]
    assert (words.leg, [by_id[id] for id in words.ids]) == ("words", ["red fish", "red"])
    assert words.scores == sorted(words.scores, reverse=True)
    assert 0 < words.coverage[1] < words.coverage[0] < 1
    assert seen.legs[0].leg == "vector"
    assert len(seen.legs[0].ids) == 2
    assert (await qdrant.search("c", axis(0)[0], 2, Filter({"no": "such"}), words=["red"])).passages == []


@pytest.mark.parametrize("tag", ["a.b", "x y", 'q"', "a[]", "\x1f"])
async def test_a_tag_may_be_called_anything(qdrant: Qdrant, tag: str) -> None:
    """Qdrant's paths would take dots and brackets for steps."""
    await qdrant.replace_document(a_document(tags={tag: "v.w"}), texts("x"), axis(0))
    assert await found(qdrant, wanted=Filter({tag: "v.w"})) == ["x"]
    assert await found(qdrant, wanted=Filter({tag: "v"})) == []


async def test_a_server_that_is_not_there_is_said(unused_tcp_port: int) -> None:
    """As a store that is down, with its address; health says it and raises nothing."""
    store = Qdrant(QdrantSettings(url=f"http://127.0.0.1:{unused_tcp_port}"))
    with pytest.raises(StoreDown, match=rf"Qdrant at http://127.0.0.1:{unused_tcp_port} cannot be used"):
        await store.search("c", axis(0)[0], 1)
    told = await store.figures()
    assert not told["up"]
    assert str(unused_tcp_port) in told["why"]
    await store.close()


@pytest.mark.parametrize(
    ("status", "body", "says", "hint"),
    [
        (401, b"{}", "it answered 401", "api_key"), (500, b"{}", "it answered 500", "Is Qdrant running"),
        (200, b"<html>", "none that Qdrant gives", "another server"), (200, b"{}", "none that Qdrant gives", "another server"),
        (200, b"[" * 200_000, "none that Qdrant gives", "another server"), (200, b'{"result": 1}', "none that Qdrant gives", "another server"),
        (200, b"\xff", "none that Qdrant gives", "another server"), (200, b"null", "none that Qdrant gives", "another server"),
    ],
    ids=["401", "500", "html", "empty", "deep", "other", "binary", "null"],
)  # fmt: skip
async def test_what_a_server_answers_is_said(status: int, body: bytes, says: str, hint: str) -> None:
    """Its status, or that it is no Qdrant, and what to look at."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    store = Qdrant(QdrantSettings(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
    try:
        with pytest.raises(StoreDown, match=says) as refused:
            await store.index_version("c")
        assert hint in str(refused.value.hint)
    finally:
        await store.close()
        server.close()


async def test_its_way_is_told(qdrant: Qdrant) -> None:
    """How many passages fit, and what it has to go by."""
    await qdrant.replace_document(a_document(), texts("x", "y"), axis(0, 1))
    lines = await qdrant.explain("c", axis(0)[0], 1, Filter({"lang": "en"}))
    assert "2 passages fit" in lines[0]
