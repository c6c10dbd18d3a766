"""The routes of a passage and its pictures, without a browser."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import pytest
from stand_in import ADMIN, BENEFITS, DATA, House, record
from test_routes import HOSTILE, client_of

from tidegate.api.page import passages
from tidegate.core.document import Box, PagePicture
from tidegate.core.errors import Busy, DocumentUnreadable, TidegateError

PNG = b"\x89PNG\r\n\x1a\n"
SHA256 = hashlib.sha256(BENEFITS.read_bytes()).hexdigest()
FLIGHT = record(2)
CLAIMS = f"/flights/{FLIGHT.id}/passages/{quote('claims#2', safe='')}"


class Drawn:
    """Pictures without a process. `error`: raised instead."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.error: TidegateError | None = None

    async def page(self, file_sha256: str, number: int) -> PagePicture:
        self.asked.append((file_sha256, number))
        if self.error is not None:
            raise self.error
        return PagePicture(PNG, 595.0, 842.0)


@pytest.fixture
def drawn(house: House) -> Drawn:
    house.pictures = Drawn()
    return house.pictures


@pytest.fixture
async def acme(house: House, drawn: Drawn) -> AsyncIterator[httpx.AsyncClient]:
    house.live.records = [record(n) for n in range(12)]
    async with client_of(house, DATA) as client:
        yield client


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


# -- what a flight read


async def test_a_flight_lists_what_it_read(acme: httpx.AsyncClient) -> None:
    """Title, document, page, heading, nearness and each leg's rank; the text; and a link where there is a picture."""
    page = (await acme.get(f"/flights/{FLIGHT.id}")).text
    said = text_of(page)
    assert "Claims handbook claims.pdf · page 1 · Deadlines · nearness 0.84 · rank 2 by nearness, 1 by words" in said
    assert "车险理赔指南 motor-zh.md · page 2 · Deadlines · nearness 0.79 · rank 4 by nearness " in said
    assert "| Annual limit | 5,000 euros |" in said
    assert re.findall(r'class="place" href="([^"]+)"', page) == [CLAIMS]
    assert "This document has no pages that could be shown." in said
    assert "The file of this document is not kept." in said


@pytest.mark.parametrize(("facts", "said"), [
    ({"collection": "default"}, "claims.pdf · page 1 · Deadlines"),
    ({"collection": "default", "scores": [0.5], "vector": "odd", "words": [None, [], 7]}, "claims.pdf · page 1 · Deadlines"),
    ({"collection": ["odd"], "scores": [0.9, 0.8, 0.7]}, "claims#2 nearness 0.80"), ({}, "a part of what the request itself brought along"),
], ids=["no scores", "odd facts", "odd collection", "no search"])
async def test_a_flight_of_any_version_can_be_shown(house: House, acme: httpx.AsyncClient, facts: dict[str, Any], said: str) -> None:
    """What it did not note is not shown."""
    house.live.records = [record(2, decisions=[(1, "retrieved", facts)] if facts else [])]
    answer = await acme.get(f"/flights/{FLIGHT.id}")
    assert answer.status_code == 200
    assert said in text_of(answer.text)


async def test_a_database_that_is_down_leaves_the_flight(house: House, acme: httpx.AsyncClient) -> None:
    """Its page says that passages cannot be looked up; a passage's own page is 503."""
    house.files.down = True
    answer = await acme.get(f"/flights/{FLIGHT.id}")
    assert answer.status_code == 200
    assert "cannot be looked up at the moment" in answer.text
    assert "no longer in its collection" not in answer.text
    for path in (CLAIMS, CLAIMS + "/pages/1"):
        assert (await acme.get(path)).status_code == 503


# -- a passage on its page


async def test_a_passage_is_shown_on_its_page(acme: httpx.AsyncClient, drawn: Drawn) -> None:
    """The picture of the page by the digest of its file, and the boxes over it in the page's own points."""
    answer = await acme.get(CLAIMS)
    assert answer.status_code == 200
    (src,) = re.findall(r'<img src="([^"]+)"', answer.text)
    assert src == f"{CLAIMS}/pages/1?file={SHA256}"
    assert 'viewBox="0 0 595.0 842.0"' in answer.text
    assert drawn.asked == [(SHA256, 1)]
    assert answer.text.count("<rect x=") > 5
    picture = await acme.get(src)
    assert (picture.content, picture.headers["content-type"]) == (PNG, "image/png")
    assert picture.headers["cache-control"] == "private, no-cache"
    assert picture.headers["x-content-type-options"] == "nosniff"


async def test_a_picture_that_the_browser_has_is_not_drawn_again(acme: httpx.AsyncClient, drawn: Drawn) -> None:
    """Its tag names file and page; whoever has it hears 304."""
    tag = (await acme.get(CLAIMS + "/pages/1")).headers["etag"]
    again = await acme.get(CLAIMS + "/pages/1", headers={"If-None-Match": tag})
    assert (again.status_code, again.content, len(drawn.asked)) == (304, b"", 1)


async def test_only_the_first_pages_of_a_long_passage_are_drawn(house: House, acme: httpx.AsyncClient, drawn: Drawn) -> None:
    """And it is said how many more there are."""
    boxes = [Box(page, 1.0, 2.0, 3.0, 4.0) for page in range(1, 10)]
    house.files.passages["claims#2"] = msgspec.structs.replace(house.files.passages["claims#2"], boxes=boxes)
    page = (await acme.get(CLAIMS)).text
    assert [number for _, number in drawn.asked] == [1, 2, 3, 4]
    assert "It goes on over 5 more pages." in page
    assert (await acme.get(CLAIMS + "/pages/9")).status_code == 200


# -- who may see, and what


@pytest.mark.parametrize("page", ["2", "0", "-1", "01x", "1.0", "9" * 40, "٣", "%2e%2e", "1%00", "+1", " 1"])
async def test_other_pages_are_not_shown(acme: httpx.AsyncClient, drawn: Drawn, page: str) -> None:
    """Only those that the passage stands on: 404 says which."""
    answer = await acme.get(f"{CLAIMS}/pages/{page}")
    assert answer.status_code == 404
    assert "It stands on 1." in answer.text or "Not Found" in answer.text
    assert drawn.asked == []


async def test_what_is_not_there_is_refused_by_name(acme: httpx.AsyncClient, drawn: Drawn) -> None:
    """Unknown flights, and passages that this flight did not read though another one might have."""
    for path, said in (
        (f"/flights/{'0' * 32}/passages/claims%232", "There is no such flight"),
        (f"/flights/{FLIGHT.id}/passages/other", "This flight read no such passage."),
    ):
        for end in ("", "/pages/1"):
            answer = await acme.get(path + end)
            assert answer.status_code == 404
            assert said in answer.text
    assert drawn.asked == []


async def test_another_tenants_passages_are_not_there(house: House, acme: httpx.AsyncClient, drawn: Drawn) -> None:
    """As if the flight did not exist; an admin sees them."""
    theirs = record(0)
    assert theirs.tenant == "globex"
    assert "claims#2" in theirs.passage_ids
    for end in ("", "/pages/1"):
        path = f"/flights/{theirs.id}/passages/claims%232{end}"
        assert (await acme.get(path)).status_code == 404
        async with client_of(house, ADMIN) as admin:
            assert (await admin.get(path)).status_code == 200
        async with client_of(house) as nobody:
            assert (await nobody.get(path)).status_code == 401
    assert len(drawn.asked) == 2


# -- what cannot be shown


@pytest.mark.parametrize(("error", "status", "said"), [
    (DocumentUnreadable("The document is encrypted and opens only with a password.", hint="Look at the document itself."), 422, "with a password"),
    (Busy("Other pages are being drawn.", hint="Look again in a moment.", retry_after_s=1.2), 429, "Look again in a moment."),
])
async def test_a_picture_that_cannot_be_had_is_told(acme: httpx.AsyncClient, drawn: Drawn, error: TidegateError, status: int, said: str) -> None:
    """A plain sentence on the page, beside the passage's text; the same for the picture's own address, with the time to come back."""
    drawn.error = error
    page = await acme.get(CLAIMS)
    assert page.status_code == status
    assert said in page.text
    assert "Annual limit" in page.text
    assert "<img" not in page.text
    picture = await acme.get(CLAIMS + "/pages/1")
    assert (picture.status_code, picture.headers.get("retry-after")) == (status, "2" if status == 429 else None)
    assert said in picture.text


async def test_what_was_removed_or_replaced_is_told(house: House, acme: httpx.AsyncClient, drawn: Drawn) -> None:
    """A passage that is gone; a file that is not kept; a picture of the version before."""
    old = await acme.get(f"{CLAIMS}/pages/1?file={'0' * 64}")
    assert (old.status_code, drawn.asked) == (404, [])
    assert "replaced since" in old.text
    house.files.passages["claims#2"] = msgspec.structs.replace(house.files.passages["claims#2"], file_sha256=None)
    unkept = await acme.get(CLAIMS)
    assert unkept.status_code == 200
    assert "The file of this document is not kept." in unkept.text
    assert (await acme.get(CLAIMS + "/pages/1")).status_code == 404
    del house.files.passages["claims#2"]
    for path in (CLAIMS, f"/flights/{FLIGHT.id}"):
        gone = await acme.get(path)
        assert gone.status_code == (404 if path == CLAIMS else 200)
        assert "This passage is no longer in its collection." in gone.text


async def test_names_and_text_of_documents_are_text(house: House, acme: httpx.AsyncClient) -> None:
    """A title, source, heading or passage that looks like HTML is shown, not run; the policy stays as it is."""
    one = msgspec.structs.replace(house.files.passages["claims#2"], title=HOSTILE, source=HOSTILE, heading=HOSTILE, text=HOSTILE)
    house.files.passages["claims#2"] = one
    for path in (f"/flights/{FLIGHT.id}", CLAIMS):
        answer = await acme.get(path)
        assert "<script>alert" not in answer.text
        assert "<img src=x" not in answer.text
        assert not re.search(r"<script(?![^>]* src=\"/assets/)|<style|\sstyle=|\son\w+=(?!alert)", answer.text)
        assert "unsafe" not in answer.headers["content-security-policy"]


def test_a_page_number_is_read_strictly() -> None:
    """Digits of ASCII only: nothing that int() would take beside them."""
    passage = passages.ReadPassage(1, "a", None, [], msgspec.structs.replace(House().files.passages["claims#2"]))
    assert passages.on_page(passage, "1") == 1
