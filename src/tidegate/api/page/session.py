"""Who is signed in: a signed cookie, so that no server memory is needed and every worker reads it alike.

The cookie holds what a key's caller is, and until when, signed with HMAC-SHA256 under a key derived from the server's secret. It holds no
API key. It is HttpOnly (no script reads it) and SameSite=Strict (no other site's request carries it).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from tidegate.core.ask import Caller

COOKIE = "tidegate_session"
LIFE_S = 12 * 3600
_MOST_CHARS = 2048


class Session(msgspec.Struct, frozen=True):
    """What the cookie says: the caller, and the second (Unix) at which it ends."""

    caller: Caller
    expires_unix_s: float


def new_session(caller: Caller, secret: bytes, life_s: float = LIFE_S) -> str:
    """The cookie's value for `caller`, good for `life_s` from now."""
    body = _encode(msgspec.json.encode(Session(caller, round(_now_s() + life_s, 3))))
    return f"{body}.{_encode(_sign(body, secret))}"


def read_session(value: str, secret: bytes) -> Session | None:
    """The session that `new_session` made; None where it was changed, is over, or never was one. Never raises."""
    if len(value) > _MOST_CHARS or not value.isascii():
        return None
    body, _, signature = value.partition(".")
    try:
        if not hmac.compare_digest(_sign(body, secret), _decode(signature)):
            return None
        session = msgspec.json.decode(_decode(body), type=Session)
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        return None
    return session if session.expires_unix_s > _now_s() else None


def session_caller(cookie_header: str | None, secret: bytes) -> Caller | None:
    """The caller that a `Cookie` header names; None where it names none of ours. Never raises.

    Whoever accepts it for a request that changes something also asks `same_origin`, and whether the caller's key still exists.
    """
    for pair in (cookie_header or "").split(";"):
        name, _, value = pair.strip().partition("=")
        if name == COOKIE and (session := read_session(value, secret)):
            return session.caller
    return None


def same_origin(headers: Mapping[str, str]) -> bool:
    """Whether a browser says that this request comes from our own page: `Origin` names the host that was asked, or, where there is no
    Origin, `Sec-Fetch-Site` says so. `headers` has lower-case names. A request that says neither is refused: browsers always say one."""
    host = headers.get("host", "")
    if (origin := headers.get("origin")) is not None:
        return bool(host) and urlsplit(origin).netloc.lower() == host.lower()
    return headers.get("sec-fetch-site") in ("same-origin", "none")


def set_cookie(value: str, *, secure: bool) -> str:
    """A `Set-Cookie` header. `secure` where the page came over https: a browser would drop such a cookie on plain http."""
    return f"{COOKIE}={value}; Path=/; Max-Age={LIFE_S}; HttpOnly; SameSite=Strict" + ("; Secure" if secure else "")


def clear_cookie() -> str:
    """A `Set-Cookie` header that ends the session in this browser."""
    return f"{COOKIE}=; Path=/; Max-Age=0; HttpOnly; SameSite=Strict"


def _sign(body: str, secret: bytes) -> bytes:
    # A key of its own: the same secret also serves others, and a signature made for one must mean nothing to another.
    key = hmac.digest(secret, b"tidegate page session v1", hashlib.sha256)
    return hmac.digest(key, body.encode(), hashlib.sha256)


def _encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    if _encode(raw) != text:  # base64 has several spellings of the same bytes; only ours counts
        raise ValueError("not as it was written")
    return raw


def _now_s() -> float:
    return time.time_ns() / 1e9
