"""The session cookie: ours alone, for a time, for our own page."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.api.page.session import COOKIE, new_session, same_origin, session_caller, set_cookie
from tidegate.core.ask import Caller

SECRET = b"0123456789abcdef0123456789abcdef"
CALLER = Caller("key_1", "acme", "data", keep=True, ttl_s=60, requests_per_minute=5, tokens_per_minute=9)
VALUE = new_session(CALLER, SECRET)


def test_a_session_says_who_signed_in() -> None:
    """Every field of the caller comes back, also among other cookies."""
    header = f"theme=dark; {COOKIE}={new_session(CALLER, SECRET)}; x=1"
    assert session_caller(header, SECRET) == CALLER


def test_a_session_ends() -> None:
    """After its time it names nobody."""
    assert session_caller(f"{COOKIE}={new_session(CALLER, SECRET, life_s=-1)}", SECRET) is None


def test_another_secret_opens_nothing() -> None:
    """A cookie of another server names nobody."""
    assert session_caller(f"{COOKIE}={new_session(CALLER, b'other' * 8)}", SECRET) is None


@given(st.data())
def test_no_changed_cookie_is_taken(data: st.DataObject) -> None:
    """Whatever character is changed, added or dropped, the cookie names nobody."""
    at = data.draw(st.integers(0, len(VALUE) - 1))
    sign = data.draw(st.sampled_from("ABCxyz019-_.=~é") | st.just(""))
    changed = VALUE[:at] + sign + VALUE[at + 1:]
    if changed != VALUE:
        assert session_caller(f"{COOKIE}={changed}", SECRET) is None


@given(st.text(max_size=300))
def test_no_header_raises(header: str) -> None:
    """Any Cookie header is read or ignored."""
    assert session_caller(header, SECRET) is None
    assert session_caller(f"{COOKIE}={header}", SECRET) is None


def test_the_cookie_holds_no_second_role() -> None:
    """A signed body with a changed role is refused: the signature covers it."""
    body, _, signature = new_session(CALLER, SECRET).partition(".")
    raised = base64.urlsafe_b64decode(body + "==").replace(b'"data"', b'"admin"')
    forged = base64.urlsafe_b64encode(raised).rstrip(b"=").decode() + "." + signature
    assert session_caller(f"{COOKIE}={forged}", SECRET) is None


def test_scripts_and_other_sites_do_not_get_the_cookie() -> None:
    """HttpOnly and SameSite=Strict always; Secure over https."""
    assert "; HttpOnly; SameSite=Strict" in set_cookie("v", secure=False)
    assert "Secure" not in set_cookie("v", secure=False)
    assert set_cookie("v", secure=True).endswith("; Secure")


@pytest.mark.parametrize(("headers", "ours"), [
    ({"host": "a:8080", "origin": "http://a:8080"}, True),
    ({"host": "a", "origin": "https://A"}, True),
    ({"host": "a:8080", "origin": "http://a:8081"}, False),
    ({"host": "a", "origin": "http://b"}, False),
    ({"host": "a", "origin": "null"}, False),
    ({"host": "a", "origin": ""}, False),
    ({"origin": "http://a"}, False),
    ({"host": "a", "sec-fetch-site": "same-origin"}, True),
    ({"host": "a", "sec-fetch-site": "cross-site"}, False),
    ({"host": "a", "sec-fetch-site": "same-site"}, False),
    ({"host": "a", "origin": "http://b", "sec-fetch-site": "same-origin"}, False),
    ({"host": "a"}, False),
])
def test_only_our_own_page_may_act_on_a_session(headers: dict[str, str], ours: bool) -> None:
    """Origin is compared with Host; without it Sec-Fetch-Site decides; with neither the answer is no."""
    assert same_origin(headers) is ours
