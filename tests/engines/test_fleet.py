"""Models by name, and settings that make sense."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tidegate.core.errors import NotFound, SettingsError
from tidegate.engines.fleet import Fleet
from tidegate.engines.settings import EngineSettings

URL = "http://127.0.0.1:1"


def section(**fields: Any) -> EngineSettings:
    return EngineSettings(**{"url": URL, "models": ["small"], **fields})


async def test_models_find_their_engine() -> None:
    """A public name leads to its engine and to the engine's own name; no name leads to the first."""
    fleet = Fleet({"a": section(), "b": section(adapter="llama_cpp", models={"large": "acme/large-7b", "huge": "h"})})
    engine, own = fleet.find("large")
    assert (engine.name, own, engine.models) == ("b", "acme/large-7b", ("large", "huge"))
    engine, own = fleet.find(None)
    assert (engine.name, own) == ("a", "small")
    assert fleet.models() == ["small", "large", "huge"]
    assert [engine.name for engine in fleet.engines] == ["a", "b"]
    await fleet.close()


def test_an_unknown_model_names_the_known_ones() -> None:
    """The error says what there is, the nearest first."""
    with pytest.raises(NotFound) as caught:
        Fleet({"a": section(models=["small", "large"])}).find("smal")
    assert caught.value.hint == "Did you mean 'small'? Known: large, small."
    with pytest.raises(NotFound, match="No engine"):
        Fleet({}).find(None)


def test_a_model_has_one_engine() -> None:
    """Two engines for one model name are a mistake in the settings."""
    with pytest.raises(SettingsError, match=r"engine 'a' and by engine 'b'"):
        Fleet({"a": section(), "b": section()})


def test_an_unknown_adapter_names_the_known_ones() -> None:
    """The error lists the adapters there are."""
    with pytest.raises(SettingsError) as caught:
        Fleet({"a": section(adapter="openia")})
    assert caught.value.hint == "Did you mean 'openai'? Known: llama_cpp, openai, scripted."


def test_an_unreadable_ca_file() -> None:
    """A CA file that is not there is a mistake in the settings, told at start."""
    with pytest.raises(SettingsError, match="ca_file"):
        Fleet({"a": section(url="https://127.0.0.1:1", ca_file="/does/not/exist.pem")})


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://host", "http://", "http://user:pw@host", "http://host/v1?x=1", "http://host:99999", "http://ho st"]
)
def test_urls_that_are_refused(url: str) -> None:
    """An address that cannot work, or that hides a secret, is refused."""
    with pytest.raises(ValidationError):
        section(url=url)


@pytest.mark.parametrize("fields", [{"models": []}, {"api_key": "a\r\nX-Evil: 1"}, {"first_token_s": 0}, {"time_out": 3}])
def test_settings_that_are_refused(fields: dict[str, Any]) -> None:
    """No model, a key that would break the header, a time-out of nothing, an unknown name."""
    with pytest.raises(ValidationError):
        section(**fields)


def test_the_api_key_is_not_shown() -> None:
    """Settings can be printed without giving the key away."""
    assert "sesame" not in repr(section(api_key="sesame"))


@pytest.mark.parametrize(
    ("url", "chat", "root"),
    [
        ("http://h:1", "/v1/chat/completions", ""),
        ("http://h:1/", "/v1/chat/completions", ""),
        ("http://h:1/v1/", "/v1/chat/completions", ""),
        ("https://h/openai/v1", "/openai/v1/chat/completions", "/openai"),
        ("https://h/v1beta/openai", "/v1beta/openai/chat/completions", "/v1beta/openai"),
    ],
)
def test_paths(url: str, chat: str, root: str) -> None:
    """Without a path /v1 is added; a path is taken as it is."""
    from tidegate.engines.openai_http import OpenAIHttp

    engine = OpenAIHttp("a", section(url=url))
    assert engine._heads["chat"].startswith(b"POST %b HTTP/1.1\r\nHost: h" % chat.encode())
    assert engine.root == root
