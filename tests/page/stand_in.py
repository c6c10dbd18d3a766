"""The page over stand-ins for the house: a live ring, a store that can be down, capabilities, and the route that the page asks."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from tests.waiting import until_blocking as until

from tidegate.api.page import CapabilityView, Page, PageDeps, TokenFolder, create_page, session_caller
from tidegate.core.ask import Caller
from tidegate.core.chunk import Usage
from tidegate.core.document import Box, StoredPassage
from tidegate.core.errors import StoreDown, Unauthorized
from tidegate.core.flight import FlightRecord
from tidegate.retrieval.loaded import Bounds
from tidegate.retrieval.loaders import pdf
from tidegate.retrieval.picture import Pictures

SECRET = b"a secret of thirty-two bytes, or so"
ADMIN = Caller("key_admin", "", "admin")
DATA = Caller("key_acme", "acme", "data")
KEYS = {"tg_admin": ADMIN, "tg_acme": DATA}
MS = 1_000_000
BENEFITS = Path(__file__).parents[2] / "examples" / "documents" / "benefit-table.pdf"

SUPPORT = {
    "type": "object",
    "required": ["question"],
    "additionalProperties": False,
    "properties": {
        "question": {
            "type": "string", "minLength": 3, "maxLength": 2000, "description": "What the customer wants to know, in English or Chinese.",
        },
        "product": {
            "type": "string", "enum": ["home", "motor", "travel", "health"], "description": "Only documents of this product are read.",
        },
    },
    "examples": [
        {"question": "How many days do I have to report a water leak?"}, {"question": "Does travel insurance cover a missed connection?"},
        {"question": "车险理赔需要准备哪些材料?"},
    ],
}
UNDERWRITING = {
    "type": "object",
    "required": ["age", "smoker", "sum_insured"],
    "properties": {
        "age": {"type": "integer", "minimum": 18, "maximum": 99, "description": "In whole years. Above 65 the medical history is needed."},
        "smoker": {"type": "boolean"},
        "sum_insured": {"type": "number", "minimum": 1000, "maximum": 5000000, "title": "Sum insured", "description": "In euros."},
        "occupation": {"type": "string", "maxLength": 80, "examples": ["teacher"]},
        "medical_history": {"type": "array", "items": {"type": "string"}, "description": "Known conditions."},
        "address": {
            "type": "object", "required": ["country"],
            "properties": {"country": {"enum": ["DE", "FR", "CN"], "type": "string"}, "city": {"type": "string", "maxLength": 60}},
        },
    },
    "examples": [
        {"age": 34, "smoker": False, "sum_insured": 200000, "occupation": "teacher"},
        {"age": 71, "smoker": True, "sum_insured": 90000, "medical_history": ["hypertension", "type 2 diabetes"]},
    ],
}
CAPABILITIES = [
    CapabilityView("support/answer", "Answers a customer's question from the insurer's documents, with the passages it rests on.", SUPPORT),
    CapabilityView("underwriting/assess", "Assesses an application and gives a decision by contract.", UNDERWRITING, streams=False),
]
PASSAGES = [
    {
        "n": 1, "id": "home-en#4", "document": "home-en.md", "title": "Home insurance: water damage", "page": None, "score": 0.8812,
        "text": "A leak must be reported within seven days of its discovery. Photographs of the damage and the invoice of the plumber "
        "help us to settle the claim. Damage that grew because the report came late is not covered, unless the insured was away from "
        "home and could not know. In that case the seven days begin on the day of return.",
    },
    {
        "n": 2, "id": "claims#2", "document": "claims.pdf", "title": "Claims handbook", "page": 4, "score": 0.8427,
        "text": "Deadlines by product. Home: 7 days. Motor: 3 days. Travel: 30 days after return.",
    },
    {"n": 3, "id": "motor-zh#1", "document": "motor-zh.md", "title": "车险理赔指南", "page": 2, "score": 0.7903,
     "text": "请在事故发生后三日内报案,并准备驾驶证、行驶证、事故认定书以及维修发票。"},
]
ANSWER = (
    "You have seven days from the day you discover the leak [1]. If you were away, the seven days begin when you return [1]. "
    "For home insurance this is the same deadline as in the claims handbook [2]."
)


def record(n: int, *, seed: int = 7, began_unix_ns: int = 1_793_000_000_000_000_000, **changes: Any) -> FlightRecord:
    """A flight as the gateway writes it: laps that add up, tokens inside them."""
    chance = random.Random(seed * 100_003 + n)
    kind = n % 6
    end, status, error = {3: ("refused", 429, "rate_limit_exceeded"), 5: ("cut", 502, "engine_cut")}.get(kind, ("stop", 200, ""))
    capability = "" if kind == 4 else "underwriting/assess" if kind == 1 else "support/answer"
    began = began_unix_ns + n * 700 * MS
    laps: list[tuple[str, int]] = [("read", chance.randint(20_000, 60_000)), ("auth", chance.randint(8_000, 30_000))]
    laps.append(("admission.limits", chance.randint(5_000, 20_000)))
    tokens: list[int] = []
    usage = Usage(exact=False)
    if end != "refused":
        if capability == "support/answer":
            laps.append(("retrieve", chance.randint(9 * MS, 30 * MS)))
        laps += [("prompt", chance.randint(100_000, 900_000)), ("engine.connect", chance.randint(50_000, 200_000))]
        laps += [("engine.send", chance.randint(20_000, 90_000)), ("engine.first_byte", chance.randint(2 * MS, 9 * MS))]
        laps.append(("engine.first_token", chance.randint(160 * MS, 900 * MS)))
        at = sum(ns for _, ns in laps)
        for _ in range(chance.randint(24, 160)):
            tokens.append(at)
            at += int(chance.gauss(24, 4) * MS) if chance.random() > 0.02 else chance.randint(120, 300) * MS
        laps.append(("stream", tokens[-1] - sum(ns for _, ns in laps)))
        laps.append(("cite" if capability == "support/answer" else "contract", chance.randint(100_000, 700_000)))
        usage = Usage(chance.randint(200, 900), len(tokens), chance.randint(0, 150))
    laps.append(("close", chance.randint(15_000, 70_000)))
    ran = end != "refused"
    made = FlightRecord(
        f"{began // MS:012x}{n:020x}", began, sum(ns for _, ns in laps), laps,
        f"/api/v1/{capability}" if capability else "/v1/chat/completions", end, status, tenant="acme" if n % 3 else "globex",
        key_id="key_acme", capability=capability, model="smollm2-360m" if ran else "", engine="local" if ran else "",
        stream=capability != "underwriting/assess", token_ns=tokens, usage=usage, first_token_ns=tokens[0] if tokens else 0,
        error_code=error, request_sha256="5f" * 32, answer_sha256="c1" * 32 if ran else "", answer_chars=len(tokens) * 4, version="0.1.0",
    )
    made.decisions = [(60_000, "limits", {"requests_left": 57, "tokens_left": 39120})]
    if capability == "support/answer" and tokens:
        stands: dict[str, Any] = {"scores": [0.8812, 0.8427, 0.7903], "vector": [[1, 0.8812], [2, 0.8427], [4, 0.7903]]}
        stands["words"] = [[2, 7.1, 0.9], [1, 9.4, 1.0], None]
        made.decisions.append((20 * MS, "retrieved", {"collection": "default", "way": "exact"} | stands))
        made.decisions.append((made.whole_ns - MS, "cited", {"quoted": ["home-en#4"]}))
        made.prompt_version, made.prompt_sha256, made.index_version = "v1", "9a" * 32, "17-5be2"
        made.passage_ids = ["home-en#4", "claims#2", "motor-zh#1"]
    for name, value in changes.items():
        setattr(made, name, value)
    return made


@dataclass
class Ring:
    """LiveFlights in a list, newest last."""

    records: list[FlightRecord] = field(default_factory=list)
    changed: asyncio.Event | None = None
    loop: asyncio.AbstractEventLoop | None = None

    @property
    def seq(self) -> int:
        return len(self.records)

    def recent(self, tenant: str | None, limit: int, after_seq: int = 0) -> list[FlightRecord]:
        found = [one for one in self.records[after_seq:] if tenant is None or one.tenant == tenant]
        return found[::-1][:limit]

    def find(self, flight_id: str) -> FlightRecord | None:
        return next((one for one in self.records if one.id == flight_id), None)

    async def wait_newer(self, seq: int) -> int:
        self.loop = asyncio.get_running_loop()
        self.changed = self.changed or asyncio.Event()
        while self.seq <= seq:
            self.changed.clear()
            await self.changed.wait()
        return self.seq

    def add(self, flight: FlightRecord) -> None:
        """From any thread."""
        self.records.append(flight)
        if self.loop is not None and self.changed is not None:
            self.loop.call_soon_threadsafe(self.changed.set)


@dataclass
class Store:
    """FlightStore in a list; raises StoreDown while `down`."""

    records: list[FlightRecord] = field(default_factory=list)
    down: bool = False

    def _ask(self) -> None:
        if self.down:
            raise StoreDown("The database cannot be reached.", hint="Is PostgreSQL running?")

    async def get_flight(self, flight_id: str) -> FlightRecord | None:
        self._ask()
        return next((one for one in self.records if one.id == flight_id), None)

    async def list_flights(
        self, *, tenant: str | None = None, capability: str | None = None, end: str | None = None, before_id: str | None = None,
        limit: int = 50,
    ) -> list[FlightRecord]:
        self._ask()
        found = [
            one for one in self.records
            if tenant in (None, one.tenant) and capability in (None, one.capability) and end in (None, one.end)
            and (not before_id or one.id < before_id)
        ]
        return sorted(found, key=lambda one: one.id, reverse=True)[:limit]


def stored() -> dict[str, StoredPassage]:
    """What the store holds of PASSAGES: one without pages, one with its place in a PDF that is kept, one of a file that is not kept. The PDF and
    the place are the example's: its first table."""
    table = next(block for block in pdf.load(str(BENEFITS), Bounds()).blocks if block.kind == "table")
    boxes = {"home-en#4": [], "claims#2": table.boxes, "motor-zh#1": [Box(2, 72.0, 90.0, 300.0, 120.0)]}
    sha256 = {"claims#2": hashlib.sha256(BENEFITS.read_bytes()).hexdigest()}
    return {
        one["id"]: StoredPassage(
            one["id"], one["document"], one["title"], table.text if one["n"] == 2 else one["text"], {"claims#2": 1, "motor-zh#1": 2}.get(one["id"]),
            "Deadlines", boxes[one["id"]], sha256.get(one["id"]),
        )
        for one in PASSAGES
    }


@dataclass
class Files:
    """FileStore; raises StoreDown while `down`."""

    passages: dict[str, StoredPassage] = field(default_factory=stored)
    files: dict[str, bytes] = field(default_factory=lambda: {hashlib.sha256(file).hexdigest(): file for file in [BENEFITS.read_bytes()]})
    down: bool = False

    async def stored_passages(self, collection: str, ids: Sequence[str]) -> list[StoredPassage]:
        if self.down:
            raise StoreDown("The database cannot be reached.", hint="Is PostgreSQL running?")
        return [self.passages[id] for id in ids if id in self.passages and collection == "default"]

    async def read_file(self, sha256: str) -> bytes | None:
        return self.files.get(sha256)


@dataclass
class House:
    """What the page stands on, and how the asked route behaves: `mode` is answer, error, refuse, message, rung, cut or hang."""

    live: Ring = field(default_factory=Ring)
    flights: Store = field(default_factory=Store)
    files: Files = field(default_factory=Files)
    pictures: Any = None
    keys_down: bool = False
    revoked: bool = False
    mode: str = "answer"
    pace_s: float = 0.0
    left: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    health: dict[str, Any] = field(default_factory=lambda: {
        "status": "ok", "why": [], "requests_in_flight": 2, "engines": {"local": {"up": True}}, "embedder": {"up": True},
        "database": {"up": True, "round_trip_ms": 0.42},
        "spool": {"records_waiting": 0, "near": False, "bytes": 18_400, "max_bytes": 64_000_000},
    })
    tokens: TokenFolder | None = None
    page: Page | None = None

    async def look_up(self, presented_key: str) -> Caller:
        if self.keys_down:
            raise StoreDown("Keys could not be read yet.", hint="The database is still starting: try again in a moment.")
        if (caller := KEYS.get(presented_key)) is None:
            raise Unauthorized("There is no such key.")
        return caller

    async def read_health(self) -> dict[str, Any]:
        return self.health


def app_of(house: House) -> FastAPI:
    """The page, and a stand-in for POST /api/v1/... that speaks the real route's events."""
    assert house.tokens is not None
    app = FastAPI()
    house.page = create_page(PageDeps(
        callers=house, live=house.live, flights=house.flights, health=house.read_health, capabilities=lambda: CAPABILITIES,  # type: ignore[arg-type]
        files=house.files, pictures=house.pictures or Pictures(house.files),
        secret=SECRET, one_time_tokens=house.tokens, current=lambda caller: None if house.revoked else caller, version="0.1.0",
    ))
    app.include_router(house.page.router)

    @app.post("/api/v1/{group}/{name}")
    async def ask(group: str, name: str, request: Request) -> Response:
        if session_caller(request.headers.get("cookie"), SECRET) is None:
            return JSONResponse({"error": {"code": "invalid_api_key", "message": "There is no key.", "hint": "Send one."}}, 401)
        body = await request.json()
        house.bodies.append(body)
        if house.mode == "refuse":
            error = {"code": "rate_limit_exceeded", "message": "This key may send 60 requests a minute.", "hint": "Wait a little."}
            return JSONResponse({"error": error | {"trace_id": "01" * 16}}, 429, headers={"Retry-After": "12"})
        if house.mode == "message":
            error = {"code": "support_unavailable", "message": "Please call us.", "ticket": "T-01A22A-2818EA-623AF1", "rung": "message"}
            return JSONResponse({"error": error | {"trace_id": "03" * 16}}, 503)
        if body.get("age", 0) > 65 and not body.get("medical_history"):
            error = {"code": "input_invalid", "message": "Above 65 the medical history is needed.", "param": "medical_history"}
            return JSONResponse({"error": error | {"trace_id": "02" * 16}}, 422)
        return StreamingResponse(events(house, name), media_type="text/event-stream")

    return app


async def events(house: House, name: str) -> AsyncIterator[str]:
    """The events of one asking, paced by `house.pace_s`."""
    def event(kind: str, body: dict[str, Any]) -> str:
        return f"event: {kind}\ndata: {json.dumps(body, ensure_ascii=False)}\n\n"

    flight = record(100_002)
    try:
        if name == "assess":
            await asyncio.sleep(house.pace_s)
            decision = {"decision": "refer", "risk_class": "C", "reasons": ["Smoker", "Age above 65"], "premium": {"amount": 148.2}}
            yield event("answer", decision | {"usage": {"prompt_tokens": 211, "completion_tokens": 48}, "trace_id": flight.id})
            return
        landing = {"rung": "faq", "note": "From our list of frequent questions.", "cause": "engine_down"}
        if house.mode == "rung":
            yield event("rung", landing)
            yield event("answer", {"answer": ANSWER, "citations": [], "ladder": landing, "usage": {}, "trace_id": flight.id})
            return
        yield event("passages", {"passages": PASSAGES})
        for n, word in enumerate(ANSWER.split(" ")):
            if n == 8 and house.mode == "cut":
                return
            if n == 8 and house.mode == "error":
                error = {"code": "engine_cut", "message": "The engine's stream ended before its end.", "hint": "Ask again."}
                yield event("error", {"error": error | {"trace_id": flight.id}})
                return
            if n == 8 and house.mode == "hang":
                await asyncio.Event().wait()
            yield event("token", {"text": word if n == 0 else " " + word})
            await asyncio.sleep(house.pace_s)
        places = {id: [list(box) for box in passage.boxes] for id, passage in house.files.passages.items()}
        cited = [
            passage | {"passage_id": passage["id"], "quoted": passage["n"] < 3, "boxes": places.get(passage["id"], [])} for passage in PASSAGES
        ]
        usage = {"prompt_tokens": 612, "completion_tokens": 44}
        yield event("answer", {"answer": ANSWER, "citations": cited, "usage": usage, "trace_id": flight.id})
    finally:
        house.left.append(name)


class Server(uvicorn.Server):
    """A server that tells the page when it begins to stop: an open live list is a request that ends only then."""

    def __init__(self, config: uvicorn.Config, page: Page) -> None:
        super().__init__(config)
        self._page = page

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._page.close()
        await super().shutdown(sockets)


@contextlib.contextmanager
def serving(house: House) -> Iterator[str]:
    """The house on a free port, in a thread. It must stop by itself, whoever still looks."""
    app = app_of(house)
    assert house.page is not None
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = Server(uvicorn.Config(app, log_level="warning"), house.page)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
        stopped = not thread.is_alive()
        server.force_exit = True
        assert stopped, "the server waits for somebody who looks"
