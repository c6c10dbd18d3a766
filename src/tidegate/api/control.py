"""The control plane: health, metrics, flights, capabilities, keys. Plain FastAPI; nothing here is on the path of an answer."""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from tidegate import __version__
from tidegate.admission.settings import MOST_CONCURRENT, MOST_MONEY, MOST_PER_MINUTE
from tidegate.api.auth import KeyRing, need_admin, no_key, presented_key
from tidegate.api.errors import error_body
from tidegate.api.page.session import session_caller
from tidegate.core.ask import Caller
from tidegate.core.chunk import End
from tidegate.core.errors import BadRequest, BodyTooLarge, MethodNotAllowed, NotFound, TidegateError
from tidegate.core.flight import FlightRecord, new_flight_id
from tidegate.core.keys import hash_key, new_key, new_key_id
from tidegate.core.plugins import nearest
from tidegate.core.ports import FlightStore, KeyLimits, KeyRecord, KeyStore, LiveFlights
from tidegate.pipeline.capability import Capability

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ControlDeps:
    """What the control plane reads. `open_sealed(flight_id, sealed)` gives kept text back."""

    keys: KeyRing
    key_store: KeyStore
    live: LiveFlights
    flights: FlightStore
    health: Callable[[], Awaitable[dict[str, Any]]]
    metrics: Callable[[], Awaitable[tuple[bytes, str]]]
    capabilities: Mapping[str, Capability]
    open_sealed: Callable[[str, bytes], dict[str, Any]]
    secret: bytes
    #: What the fleet knows of each engine, and an operator's order: no new requests to it (True), or requests again.
    engines: Callable[[], dict[str, dict[str, Any]]] = dict
    drain: Callable[[str, bool], None] | None = None



class LimitsOfKey(BaseModel):
    """New limits of a key; what is left out stays."""

    model_config = ConfigDict(extra="forbid")
    requests_per_minute: int | None = Field(None, ge=0, le=MOST_PER_MINUTE, description="0: limits.requests_per_minute applies.")
    tokens_per_minute: int | None = Field(None, ge=0, le=MOST_PER_MINUTE, description="0: limits.tokens_per_minute applies.")
    concurrent: int | None = Field(None, ge=0, le=MOST_CONCURRENT, description="0: limits.concurrent applies.")
    money_per_day: float | None = Field(None, ge=0, le=MOST_MONEY, allow_inf_nan=False, description="0: limits.money_per_day applies.")


class NewKey(BaseModel):
    """What a new key may do."""

    model_config = ConfigDict(extra="forbid")
    tenant: str = Field(min_length=1, max_length=64, pattern=r"^[\w.-]+$", description="Whose key it is.")
    role: Literal["data", "admin"] = Field("data", description="data keys ask models, admin keys manage.")
    name: str = Field("", max_length=200, description="A name for people.")
    requests_per_minute: int = Field(0, ge=0, le=MOST_PER_MINUTE, description="0: limits.requests_per_minute applies.")
    tokens_per_minute: int = Field(0, ge=0, le=MOST_PER_MINUTE, description="0: limits.tokens_per_minute applies.")
    concurrent: int = Field(0, ge=0, le=MOST_CONCURRENT, description="0: limits.concurrent applies.")
    money_per_day: float = Field(0.0, ge=0, le=MOST_MONEY, allow_inf_nan=False, description="0: limits.money_per_day applies.")


def create_control(deps: ControlDeps) -> FastAPI:
    """The app behind the hot routes."""
    app = FastAPI(title="Tidegate", version=__version__, docs_url=None, redoc_url=None, openapi_url="/api/openapi.json")
    _say_errors(app)
    app.include_router(_routes(deps))
    return app


def _routes(deps: ControlDeps) -> APIRouter:
    router = APIRouter()

    async def caller(request: Request) -> Caller:
        key = presented_key(dict(request.scope["headers"]))
        if key is not None:
            return await deps.keys.look_up(key)
        found = session_caller(request.headers.get("cookie", ""), deps.secret)
        found = deps.keys.by_id(found.key_id) if found is not None else None
        if found is None:
            raise no_key()
        if request.method != "GET":
            raise BadRequest("A session only reads here.", hint="Use an API key: `Authorization: Bearer KEY`.")
        return found

    async def admin(who: Annotated[Caller, Depends(caller)]) -> Caller:
        return need_admin(who)

    @router.get("/health", summary="Figures, and what they mean")
    async def health() -> Response:
        body = await deps.health()
        return _json(body, 503 if body.get("status") == "down" else 200)

    @router.get("/metrics", summary="Prometheus")
    async def metrics() -> Response:
        body, media_type = await deps.metrics()
        return Response(body, media_type=media_type)

    @router.get("/api/v1/flights", summary="The newest flights of the key's tenant; an admin key sees all")
    async def flights(
        who: Annotated[Caller, Depends(caller)], limit: int = 50, before: str | None = None, capability: str | None = None,
        end: str | None = None,
    ) -> Response:
        if end is not None and end not in get_args(End):
            raise BadRequest(f"No flight ends with {end[:40]!r}.", hint=nearest(end, get_args(End)), param="end")
        if not 1 <= limit <= 500:
            raise BadRequest("`limit` is not between 1 and 500.", hint="Page with `before`.", param="limit")
        tenant = None if who.role == "admin" else who.tenant
        records = await newest(deps, tenant, capability, end, before, limit)
        return _json({"flights": records})

    @router.get("/api/v1/flights/{flight_id}", summary="One flight")
    async def flight(flight_id: str, who: Annotated[Caller, Depends(caller)], text: bool = False) -> Response:
        record = deps.live.find(flight_id) or await deps.flights.get_flight(flight_id)
        if record is None or (who.role != "admin" and record.tenant != who.tenant):
            raise NotFound(f"There is no flight {flight_id[:64]!r}.", hint="GET /api/v1/flights lists the newest.")
        body: dict[str, Any] = msgspec.to_builtins(record)
        if text and record.kept and record.tenant == who.tenant:
            kept = await deps.flights.get_kept(flight_id)
            body["text"] = deps.open_sealed(flight_id, kept.sealed) if kept else None
        return _json(body)

    @router.get("/api/v1/capabilities", summary="The capabilities and their contracts")
    async def capabilities(who: Annotated[Caller, Depends(caller)]) -> Response:
        rows = [
            {
                "path": item.path, "description": item.manifest.description, "streams": item.streams, "sha256": item.sha256,
                "prompt": item.manifest.prompt, "input_schema": item.input_schema, "output_schema": item.output_schema,
                "ladder": [rung.rung for rung in item.manifest.ladder],
            }
            for item in deps.capabilities.values()
        ]
        return _json({"capabilities": rows})

    @router.get("/api/v1/engines", summary="The engines, and what is asked of them")
    async def list_engines(who: Annotated[Caller, Depends(admin)]) -> Response:
        return _json({"engines": deps.engines()})

    @router.post("/api/v1/engines/{name}/drain", summary="No new requests to this engine; those that run end well")
    async def drain_engine(name: str, who: Annotated[Caller, Depends(admin)]) -> Response:
        return order_engine(name, True)

    @router.post("/api/v1/engines/{name}/resume", summary="Requests to this engine again, little by little")
    async def resume_engine(name: str, who: Annotated[Caller, Depends(admin)]) -> Response:
        return order_engine(name, False)

    def order_engine(name: str, on: bool) -> Response:
        if deps.drain is None:
            raise NotFound("This gateway has no engines to drain.", hint="See /health.")
        deps.drain(name, on)
        return _json({"engine": name, **deps.engines()[name]})

    @router.get("/api/v1/keys", summary="All keys, without the keys")
    async def list_keys(who: Annotated[Caller, Depends(admin)]) -> Response:
        rows = [{**msgspec.to_builtins(key), "sha256": key.sha256[:12]} for key in await deps.key_store.list_keys()]
        return _json({"keys": rows})

    @router.post("/api/v1/keys", status_code=201, summary="A new key, shown once")
    async def create_key(wanted: NewKey, who: Annotated[Caller, Depends(admin)]) -> Response:
        key, record = make_key(wanted)
        await deps.key_store.add_key(record)
        await deps.keys.refresh()
        return _json({"id": record.id, "key": key, "tenant": record.tenant}, 201)

    @router.patch("/api/v1/keys/{key_id}", summary="Change what a key may use")
    async def limit_key(key_id: str, wanted: LimitsOfKey, who: Annotated[Caller, Depends(admin)]) -> Response:
        if not await deps.key_store.limit_key(key_id, KeyLimits(**wanted.model_dump())):
            raise NotFound(f"There is no living key {key_id[:64]!r}.", hint="GET /api/v1/keys lists them.")
        await deps.keys.refresh()
        return Response(status_code=204)

    @router.delete("/api/v1/keys/{key_id}", summary="Revoke a key")
    async def revoke_key(key_id: str, who: Annotated[Caller, Depends(admin)]) -> Response:
        if not await deps.key_store.revoke_key(key_id):
            raise NotFound(f"There is no living key {key_id[:64]!r}.", hint="GET /api/v1/keys lists them.")
        await deps.keys.refresh()
        return Response(status_code=204)

    return router


def _json(body: object, status: int = 200) -> Response:
    """JSON that ends its line, for whoever reads it in a terminal."""
    return Response(msgspec.json.encode(body) + b"\n", status, media_type="application/json")


def make_key(wanted: NewKey) -> tuple[str, KeyRecord]:
    """A new key and what is stored of it."""
    key = new_key()
    unix_ns = time.time_ns()
    record = KeyRecord(
        new_key_id(), hash_key(key), wanted.tenant, wanted.role, wanted.name, unix_ns / 1e9,
        requests_per_minute=wanted.requests_per_minute, tokens_per_minute=wanted.tokens_per_minute, concurrent=wanted.concurrent,
        money_per_day=wanted.money_per_day,
    )
    return key, record


async def newest(
    deps: ControlDeps, tenant: str | None, capability: str | None, end: str | None, before: str | None, limit: int
) -> list[FlightRecord]:
    """Newest first: what is in memory, then what the database has. The database lags by a batch, so both are read."""
    found: dict[str, FlightRecord] = {}
    for record in deps.live.recent(tenant, 500):
        if (before is None or record.id < before) and (not capability or record.capability == capability) and (not end or record.end == end):
            found[record.id] = record
    if len(found) < limit or before is not None:
        for record in await deps.flights.list_flights(tenant=tenant, capability=capability, end=end, before_id=before, limit=limit):
            found.setdefault(record.id, record)
    return sorted(found.values(), key=lambda record: record.id, reverse=True)[:limit]


def _say_errors(app: FastAPI) -> None:
    def answer(error: TidegateError, status: int | None = None) -> JSONResponse:
        trace_id = new_flight_id(time.time_ns())
        headers = {"retry-after": str(max(1, round(error.retry_after_s)))} if error.retry_after_s is not None else None
        return JSONResponse(error_body(error, trace_id), status or error.http_status, headers)

    @app.exception_handler(TidegateError)
    async def known(request: Request, error: TidegateError) -> JSONResponse:
        return answer(error)

    @app.exception_handler(Exception)  # the last door: the server logs the traceback, the caller gets our shape
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        wrong = TidegateError("Something went wrong inside Tidegate.", hint="Give the operator this trace_id.")
        trace_id = new_flight_id(time.time_ns())
        log.error("unexpected error in %s, trace_id %s", request.url.path[:200], trace_id)
        return JSONResponse(error_body(wrong, trace_id), 500)

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 404:
            return answer(NotFound(f"There is no route {request.url.path[:200]}.", hint="See /api/openapi.json."))
        if error.status_code == 405:
            return answer(MethodNotAllowed(f"{request.url.path[:200]} does not take {request.method}.", hint="See /api/openapi.json."))
        if error.status_code == 413:
            return answer(BodyTooLarge("The body is too large.", hint="The bound is server.max_body_bytes."))
        return answer(BadRequest(str(error.detail)), error.status_code)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        name = ".".join(str(step) for step in first["loc"][1:])
        content_type = request.headers.get("content-type", "")
        if first["type"] == "extra_forbidden":  # NewKey is the only body here
            said, hint = f"The field {name[:80]!r} is not known here.", nearest(name[:80], NewKey.model_fields)
        elif not name and first["type"] != "missing" and "json" not in content_type:
            said, hint = f"The body is not JSON but {content_type[:80] or 'of no type'}.", "Send the header `Content-Type: application/json`."
        else:
            said, hint = f"{name or 'The body'}: {first['msg']}.", "See /api/openapi.json."
        return answer(BadRequest(said, hint=hint, param=name or None), 422)
