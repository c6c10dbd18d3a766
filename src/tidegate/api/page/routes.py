"""The page's routes. Every answer is self-contained: own files only, no inline script or style, nothing for other sites to frame."""

from __future__ import annotations

import math
from urllib.parse import parse_qs, quote, urlencode

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse, StreamingResponse

from tidegate.api.page import health, listing, passages, session
from tidegate.api.page.assets import Assets
from tidegate.api.page.deps import PageDeps
from tidegate.api.page.door import Door
from tidegate.api.page.live import Live
from tidegate.api.page.view import Views
from tidegate.api.page.words import ENDS
from tidegate.core.ask import Caller
from tidegate.core.errors import NotFound, StoreDown, TidegateError, Unauthorized
from tidegate.core.flight import FlightRecord

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # not `no-referrer`: with that a browser sends `Origin: null` with our own forms
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_MOST_FORM_BYTES = 8192


def _html(text: str, status: int = 200, **headers: str) -> HTMLResponse:
    return HTMLResponse(text, status, headers=HEADERS | {name.replace("_", "-"): value for name, value in headers.items()})


class Page:
    """The page: mount `router`, call `close()` when the server begins to stop."""

    def __init__(self, deps: PageDeps) -> None:
        self._deps = deps
        self._assets = Assets()
        self._views = Views(self._assets, deps.version)
        self._reader = health.HealthReader(deps.health)
        self._door = Door()
        self.live = Live(deps, self._views, self._reader)
        self.router = APIRouter(include_in_schema=False)
        add = self.router.add_api_route
        add("/", self._overview, methods=["GET"])
        add("/flights/{flight_id}", self._flight, methods=["GET"])
        add("/flights/{flight_id}/passages/{passage_id}", self._passage, methods=["GET"])
        add("/flights/{flight_id}/passages/{passage_id}/pages/{page}", self._picture, methods=["GET"])
        add("/live/flights", self._live_flights, methods=["GET"])
        add("/login", self._login, methods=["GET"])
        add("/login", self._try_key, methods=["POST"])
        add("/logout", self._logout, methods=["POST"])
        add("/assets/{name}", self._asset, methods=["GET"])

    def close(self) -> None:
        """Ends the live lists, so that a shutdown need not wait for open pages."""
        self.live.close()

    # Who looks.

    def _caller(self, request: Request) -> Caller | None:
        caller = session.session_caller(request.headers.get("cookie"), self._deps.secret)
        return self._deps.current(caller) if caller is not None else None

    def _login_page(self, *, status: int = 401, problem: str = "", hint: str = "", then: str = "/", **headers: str) -> Response:
        return _html(self._views.page("login.html", title="Sign in", problem=problem, hint=hint, then=_local_path(then)), status, **headers)

    async def _login(self, request: Request) -> Response:
        token = request.query_params.get("token")
        if token is None:
            return self._login_page(status=200, then=request.query_params.get("then", "/"))
        if (wait_s := self._door.wait_s(_address(request))) > 0:
            return self._shut(wait_s)
        caller = self._deps.one_time_tokens.redeem(token)
        if caller is None:
            self._door.failed(_address(request))
            hint = "Sign in with an API key, or start `tidegate up` again for a new link."
            return self._login_page(problem="This link was used before, or is too old.", hint=hint)
        # Not a redirect: where the link was followed from another site, a redirect would still be that site's navigation, and a
        # SameSite=Strict cookie would not go with it. A page of ours that goes on by itself starts a navigation of our own.
        return _html(self._views.page("signed_in.html", title="Signed in"), Set_Cookie=self._cookie(request, caller))

    async def _try_key(self, request: Request) -> Response:
        form = await _form(request)
        then = form.get("then", "/")
        if not session.same_origin(request.headers):
            return self._login_page(status=403, problem="This form was sent from another site.", hint="Sign in on this page itself.")
        address = _address(request)
        if (wait_s := self._door.wait_s(address)) > 0:
            return self._shut(wait_s)
        try:
            caller = await self._deps.callers.look_up(form.get("key", "").strip())
        except Unauthorized:
            self._door.failed(address)
            hint = "Keys begin with tg_ and are made by `tidegate keys create`."
            return self._login_page(problem="This key is not known.", hint=hint, then=then)
        except StoreDown as error:
            return self._login_page(status=503, problem="Keys cannot be read at the moment.", hint=error.hint or error.message, then=then)
        self._door.opened(address)
        location = quote(_local_path(then), safe="/?&=%-_.~")
        return Response(None, 303, headers=HEADERS | {"Location": location, "Set-Cookie": self._cookie(request, caller)})

    async def _logout(self, request: Request) -> Response:
        if not session.same_origin(request.headers):
            return self._sorry(403, "Not from here", "This form was sent from another site.", "Sign out on this page itself.")
        return RedirectResponse("/login", 303, headers=HEADERS | {"Set-Cookie": session.clear_cookie()})

    def _shut(self, wait_s: float) -> Response:
        seconds = math.ceil(wait_s)
        hint = f"Try again in {-(-seconds // 60)} min."
        return self._login_page(status=429, problem="Too many failed attempts from this address.", hint=hint, Retry_After=str(seconds))

    def _sorry(self, status: int, title: str, word: str, hint: str) -> Response:
        return _html(self._views.page("missing.html", title=title, word=word, hint=hint), status)

    def _cookie(self, request: Request, caller: Caller) -> str:
        # A proxy that speaks https for us says so, and so does the browser; whoever lies about it only spoils his own cookie.
        seen = (request.url.scheme, request.headers.get("x-forwarded-proto", ""), request.headers.get("origin", "").partition(":")[0])
        return session.set_cookie(session.new_session(caller, self._deps.secret), secure="https" in seen)

    # What is seen.

    async def _overview(self, request: Request) -> Response:
        if (caller := self._caller(request)) is None:
            return self._login_page()
        wanted = _wanted(request, caller)
        recent = self._deps.live.recent(wanted.tenant, health.RECENT)
        older = await listing.in_store(self._deps.flights, wanted)
        found = listing.newest(listing.in_memory(self._deps.live, wanted), older.flights)
        shown = found[:listing.ON_A_PAGE]
        capabilities = self._deps.capabilities()
        chosen = {"capability": wanted.capability, "end": wanted.end}
        filters = {name: value for name, value in chosen.items() if value}
        return _html(self._views.page(
            "overview.html", title="Overview", caller=caller, health=self._views.health(await self._reader.read(), recent),
            capabilities=self._views.capabilities(capabilities), rows=self._views.rows(shown), count=len(shown), wanted=wanted,
            known=[one.path for one in capabilities], filters=urlencode(filters), store_down=older.down,
            older=urlencode(filters | {"before": shown[-1].id}) if len(found) > len(shown) else "",
        ))

    async def _flight(self, request: Request, flight_id: str) -> Response:
        if (caller := self._caller(request)) is None:
            return self._login_page(then=f"/flights/{flight_id}")
        flight = await self._find(flight_id, caller)
        if isinstance(flight, Response):
            return flight
        down = ""
        try:
            read = await passages.read(self._deps.files, flight)
        except StoreDown as error:
            read, down = passages.noted(flight), error.message
        return _html(self._views.flight(flight, caller, [(one, *passages.without(one, flight, self._deps.files)) for one in read], down))

    async def _find(self, flight_id: str, caller: Caller) -> FlightRecord | Response:
        """The flight, or the page that says why there is none."""
        try:
            flight = await listing.find(self._deps.live, self._deps.flights, flight_id, _tenant(caller))
        except StoreDown as error:
            word = "This flight is not among the newest, and the database that keeps older ones cannot be reached."
            return self._sorry(503, "Not at the moment", word, error.hint or error.message)
        if flight is None:
            hint = "Its id may be mistyped, it may be another tenant's, or it was forgotten."
            return self._sorry(404, "No such flight", "There is no such flight.", hint)
        return flight

    async def _passage(self, request: Request, flight_id: str, passage_id: str) -> Response:
        """A passage of a flight on the pages that it stands on. Whoever may see the flight may see what it read, and no other page."""
        if (caller := self._caller(request)) is None:
            return self._login_page(then=f"/flights/{flight_id}/passages/{passage_id}")
        flight = await self._find(flight_id, caller)
        if isinstance(flight, Response):
            return flight
        try:
            passage = _of(await passages.read(self._deps.files, flight), passage_id)
        except TidegateError as error:
            return self._sorry(error.http_status, "Not to be shown", error.message, error.hint or "")
        why, hint = passages.without(passage, flight, self._deps.files)
        sheets = [await self._sheet(passage, page) for page in passage.pages[:passages.MOST_PAGES]] if not why else []
        status = next((sheet.problem.http_status for sheet in sheets if sheet.problem is not None), 404 if passage.now is None else 200)
        return _html(self._views.passage(flight, caller, passage, sheets, why, hint), status)

    async def _sheet(self, passage: passages.ReadPassage, page: int) -> passages.Sheet:
        assert passage.now is not None
        try:
            picture = await self._deps.pictures.page(passage.now.file_sha256 or "", page)
        except TidegateError as error:
            return passages.Sheet(page, [], problem=error)
        return passages.Sheet(page, passage.places(page), picture)

    async def _picture(self, request: Request, flight_id: str, passage_id: str, page: str) -> Response:
        """A page as a picture, of the file with the digest `file` where one is named."""
        if (caller := self._caller(request)) is None:
            return _plain(401, "Signed out.")
        flight = await self._find(flight_id, caller)
        if isinstance(flight, Response):
            return _plain(flight.status_code, "There is no such flight, or it cannot be read now.")
        try:
            passage = _of(await passages.read(self._deps.files, flight), passage_id)
            number = passages.on_page(passage, page)
            why, hint = passages.without(passage, flight, self._deps.files)
            if why or passage.now is None or passage.now.file_sha256 is None:
                raise NotFound(why, hint=hint)
            sha256 = passage.now.file_sha256
            if request.query_params.get("file", sha256) != sha256:
                raise NotFound("The document was replaced since.", hint="Load the page that shows the picture again.")
            headers = HEADERS | {"Cache-Control": "private, no-cache", "ETag": f'"{sha256[:32]}-{number}"'}
            if request.headers.get("if-none-match") == headers["ETag"]:
                return Response(None, 304, headers=headers)
            picture = await self._deps.pictures.page(sha256, number)
        except TidegateError as error:
            wait = {"Retry-After": str(math.ceil(error.retry_after_s))} if error.retry_after_s else {}
            return _plain(error.http_status, f"{error.message} {error.hint or ''}".strip(), wait)
        return Response(picture.png, headers=headers, media_type="image/png")

    async def _live_flights(self, request: Request) -> Response:
        if (caller := self._caller(request)) is None:
            return Response("Signed out.\n", 401, headers=HEADERS, media_type="text/plain")
        if self.live.full:
            return Response("Too many live pages are open.\n", 503, headers=HEADERS | {"Retry-After": "10"}, media_type="text/plain")
        events = self.live.events(_wanted(request, caller), lambda: self._caller(request) is not None)
        return StreamingResponse(events, headers=HEADERS | {"X-Accel-Buffering": "no"}, media_type="text/event-stream")

    async def _asset(self, request: Request, name: str) -> Response:
        if (asset := self._assets.find(name)) is None:
            return Response("There is no such file.\n", 404, headers=HEADERS, media_type="text/plain")
        fixed = request.query_params.get("v") == asset.digest
        keep = "public, max-age=31536000, immutable" if fixed else "no-cache"
        headers = HEADERS | {"Cache-Control": keep, "ETag": f'"{asset.digest}"'}
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(None, 304, headers=headers)
        return Response(asset.body, headers=headers, media_type=asset.media_type)


def _of(read: list[passages.ReadPassage], passage_id: str) -> passages.ReadPassage:
    """Raises NotFound for a passage that the flight did not read."""
    if (found := next((one for one in read if one.id == passage_id), None)) is None:
        raise NotFound("This flight read no such passage.", hint="Its page lists those that it read.")
    return found


def _plain(status: int, text: str, headers: dict[str, str] | None = None) -> Response:
    return Response(text + "\n", status, headers=HEADERS | (headers or {}), media_type="text/plain")


def _tenant(caller: Caller) -> str | None:
    return None if caller.role == "admin" else caller.tenant


def _wanted(request: Request, caller: Caller) -> listing.Wanted:
    query = request.query_params
    end = query.get("end", "")
    return listing.Wanted(_tenant(caller), query.get("capability", "")[:200], end if end in ENDS else "", query.get("before", "")[:64])


def _local_path(then: str) -> str:
    """A path on this site, whatever was asked: never another site's address."""
    return then if then.startswith("/") and not then.startswith("//") and "\\" not in then and then.isprintable() else "/"


def _address(request: Request) -> str:
    return request.client.host if request.client else ""


async def _form(request: Request) -> dict[str, str]:
    """The fields of a small form; one that is too large or not UTF-8 has none."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > _MOST_FORM_BYTES:
            return {}
    try:
        return {name: values[0] for name, values in parse_qs(body.decode(), keep_blank_values=True, errors="strict").items()}
    except (UnicodeDecodeError, ValueError):
        return {}
