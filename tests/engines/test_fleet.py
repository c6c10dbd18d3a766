"""Models by name, settings that make sense, and members that are used only where they passed their checks."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import email.utils
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pydantic import ValidationError

from tidegate.bench.behaviour import Behaviour
from tidegate.bench.script import Request
from tidegate.bench.scripted import Scripted
from tidegate.core.ask import EngineCall
from tidegate.core.errors import EngineNotAdmitted, EngineRefused, NotFound, SettingsError
from tidegate.core.flight import Flight
from tidegate.engines import fleet as fleet_module
from tidegate.engines.fleet import Fleet
from tidegate.engines.member import Member
from tidegate.engines.settings import EngineSettings

from .conftest import until

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


async def test_a_model_may_have_several_engines() -> None:
    """The first of the settings is asked, and all are named, each with its own name for the model."""
    fleet = Fleet({"a": section(models={"small": "acme/small"}), "b": section(models=["small", "large"])})
    assert [(engine.name, own) for engine, own in fleet.instances("small")] == [("a", "acme/small"), ("b", "small")]
    assert [engine.name for engine, _ in fleet.instances(None)] == ["a", "b"]
    assert fleet.find("small")[0].name == "a"
    assert fleet.models() == ["small", "large"]
    with pytest.raises(NotFound):
        fleet.instances("none")
    await fleet.close()


def test_an_unknown_adapter_names_the_known_ones() -> None:
    """The error lists the adapters there are."""
    with pytest.raises(SettingsError) as caught:
        Fleet({"a": section(adapter="openia")})
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("Did you mean 'openai'? Known: llama_cpp, openai, ")


def test_an_unreadable_ca_file() -> None:
    """A CA file that is not there is a mistake in the settings, told at start."""
    with pytest.raises(SettingsError, match="ca_file"):
        Fleet({"a": section(url="https://127.0.0.1:1", ca_file="/does/not/exist.pem")})


@pytest.mark.parametrize("file", ["/does/not/exist.gguf", "/"])
def test_an_unreadable_tokenizer(file: str) -> None:
    """Likewise a vocabulary."""
    with pytest.raises(SettingsError, match=r"tokenizer of \[engines\.a\]"):
        Fleet({"a": section(tokenizer=file)})


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


# -- members that failed a check --


class Deaf(Behaviour):
    """Does not obey stop strings."""

    def apply(self, request: Request, body: dict[str, Any]) -> Request:
        return super().apply(request, {key: value for key, value in body.items() if key != "stop"})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks often, and checks again soon."""
    monkeypatch.setattr(fleet_module, "UP_S", 0.02)
    monkeypatch.setattr(fleet_module, "DOWN_S", 0.02)
    monkeypatch.setattr(fleet_module, "AGAIN_S", 0.1)


@asynccontextmanager
async def watched(server: Scripted, **more: Any) -> AsyncIterator[Fleet]:
    """A fleet of one engine, watched as the gateway does."""
    fleet = Fleet({"a": section(adapter="scripted", url=server.url, models=["scripted"], **more)})
    task = asyncio.get_running_loop().create_task(fleet.watch())
    try:
        yield fleet
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await fleet.close()


async def test_an_engine_that_passes_is_admitted(server: Scripted, caplog: pytest.LogCaptureFixture) -> None:
    """It is used before, for want of a proof, and after; the log says so once."""
    caplog.set_level(logging.INFO, "tidegate.engines.fleet")
    async with watched(server) as fleet:
        assert fleet.find("scripted")[0].name == "a"
        assert fleet.figures()["a"] == {"admitted": True, "conformance": "unknown", "fleet": {"requests": 0, "breaker": "closed"}}
        await until(lambda: fleet.members["a"].state == "passed")
        assert fleet.find("scripted")[0].name == "a"
        figures = fleet.figures()["a"]
        assert (figures["admitted"], figures["conformance"], "checks_failed" in figures) == (True, "passed", False)
    assert [record.message.partition(":")[0] for record in caplog.records] == ["engine 'a' is admitted"]


async def test_an_engine_that_fails_a_must_is_not_used(server: Scripted, caplog: pytest.LogCaptureFixture) -> None:
    """Requests for its model are refused with the check that failed and the way out; figures and log name it too."""
    server.behaviour = Deaf()
    async with watched(server) as fleet:
        await until(lambda: fleet.members["a"].state == "failed")
        with pytest.raises(EngineNotAdmitted, match="'a' failed the check stop: stop string ") as caught:
            fleet.find("scripted")
        with pytest.raises(EngineNotAdmitted):
            fleet.find(None)
        with pytest.raises(EngineNotAdmitted):
            fleet.instances("scripted")
        assert (caught.value.public_code, caught.value.http_status) == ("engine_not_admitted", 503)
        assert "tidegate check http://" in str(caught.value.hint)
        figures = fleet.figures()["a"]
        assert figures["admitted"] is False
        assert list(figures["checks_failed"]) == ["stop"]
        assert fleet.models() == ["scripted"], "what is configured is shown"
    assert "failed the check stop" in caplog.text


async def test_an_engine_that_was_repaired_is_used_again(server: Scripted) -> None:
    """It is checked again after a while."""
    server.behaviour = Deaf()
    async with watched(server) as fleet:
        await until(lambda: fleet.members["a"].state == "failed")
        server.behaviour = Behaviour()
        await until(lambda: fleet.members["a"].state == "passed")
        assert fleet.find("scripted")[0].name == "a"


async def test_an_engine_that_comes_back_is_checked_again(server: Scripted) -> None:
    """It may have come back as another one."""
    async with watched(server) as fleet:
        member = fleet.members["a"]
        await until(lambda: member.state == "passed")
        await server.close()
        await until(lambda: member.up is False)
        assert fleet.find("scripted")[0].name == "a", "a request says best that nobody answers"
        again = Scripted(behaviour=Deaf())
        await again.listen(server.host, server.port)
        try:
            await until(lambda: member.state == "failed")
        finally:
            await again.close()


async def test_another_engine_of_the_model_takes_over(server: Scripted) -> None:
    """The model's requests go to the member that passed; one that is down comes last."""
    deaf = Scripted(behaviour=Deaf())
    await deaf.listen("127.0.0.1", 0)
    fleet = Fleet({
        "down": section(models=["scripted"]),
        "deaf": section(adapter="scripted", url=deaf.url, models=["scripted"]),
        "good": section(adapter="scripted", url=server.url, models=["scripted"]),
    })
    task = asyncio.get_running_loop().create_task(fleet.watch())
    try:
        await until(lambda: fleet.members["deaf"].state == "failed" and fleet.members["down"].up is False)
        assert [engine.name for engine, _ in fleet.instances("scripted")] == ["good", "down"]
        assert fleet.find("scripted")[0].name == "good"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await fleet.close()
        await deaf.close()


async def test_a_warning_is_only_shown(server: Scripted) -> None:
    """conformance = "warn": it failed, and it is used."""
    server.behaviour = Deaf()
    async with watched(server, conformance="warn") as fleet:
        await until(lambda: fleet.members["a"].state == "failed")
        assert fleet.find("scripted")[0].name == "a"
        figures = fleet.figures()["a"]
        assert (figures["admitted"], figures["conformance"], list(figures["checks_failed"])) == (True, "failed", ["stop"])


async def test_a_check_that_fails_once_has_not_failed(server: Scripted) -> None:
    """An engine that restarts in the middle of a check is not ill: what fails must fail twice."""

    class Once(Deaf):
        def apply(self, request: Request, body: dict[str, Any]) -> Request:
            if "stop" in body:
                server.behaviour = Behaviour()
            return super().apply(request, body)

    server.behaviour = Once()
    fleet = Fleet({"a": section(adapter="scripted", url=server.url, models=["scripted"])})
    assert await fleet.check(fleet.members["a"])
    assert fleet.members["a"].state == "passed"
    await fleet.close()


async def test_an_engine_without_checks_is_looked_at_too(server: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is up is known, so that one that is down comes last; it is never checked."""
    checked: list[str] = []

    async def check(self: Fleet, member: Member) -> bool:
        checked.append(member.engine.name)
        return True

    monkeypatch.setattr(Fleet, "check", check)
    own = {"adapter": "scripted", "models": ["scripted"], "conformance": "off"}
    fleet = Fleet({"dead": section(**own), "alive": section(url=server.url, **own)})
    task = asyncio.get_running_loop().create_task(fleet.watch())
    try:
        await until(lambda: fleet.members["dead"].up is False and fleet.members["alive"].up is True)
        assert [engine.name for engine, _ in fleet.instances("scripted")] == ["alive", "dead"]
        assert [(figures["admitted"], figures["conformance"]) for figures in fleet.figures().values()] == [(True, "off")] * 2
        await server.close()
        await until(lambda: fleet.members["alive"].up is False)
        assert checked == []
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await fleet.close()


# -- what an engine says by HTTP --


def in_s(seconds: float) -> str:
    return email.utils.format_datetime(datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds), usegmt=True)


@pytest.mark.parametrize("status", ["429 Too Many Requests", "503 Service Unavailable"])
@pytest.mark.parametrize(
    ("header", "least_s", "most_s"),
    [
        ("7", 6, 7), ("0.5", 0.1, 0.5), (in_s(3600), 59, 60), ("31536000", 59, 60), (in_s(31_536_000), 59, 60), ("9" * 400, 59, 60), ("soon", 0, 0),
        ("-5", 0, 0), ("", 0, 0), ("Wed, 99 Foo 2026 00:00:00 GMT", 0, 0), (in_s(-3600), 0, 0), (None, 0, 0),
    ],
    ids=[
        "seconds", "less than one", "date", "a year", "date in a year", "endless", "garbage", "negative", "empty", "no date",
        "date in the past", "none",
    ],
)  # fmt: skip
async def test_retry_after_in_all_its_forms(status: str, header: str | None, least_s: float, most_s: float) -> None:
    """Seconds and dates are obeyed, at most max_retry_after_s; what nobody understands holds nobody off; the breaker counts none of it."""
    asked = 0

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split()[0]))
            asked += 1
            told = f"retry-after: {header}\r\n" if header is not None else ""
            writer.write(f"HTTP/1.1 {status}\r\n{told}content-length: 2\r\n\r\n{{}}".encode())
        writer.close()

    server = await asyncio.start_server(meet, "127.0.0.1", 0)
    fleet = Fleet({"a": section(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", conformance="off")})
    try:
        call = EngineCall("chat", "small", {"messages": []})
        with pytest.raises(EngineRefused):
            await fleet.find("small")[0].start(call, Flight("/test"))
        if most_s:
            with pytest.raises(EngineRefused) as caught:
                fleet.find("small")
            assert caught.value.retry_after_s is not None
            assert least_s <= caught.value.retry_after_s <= most_s
        else:
            with pytest.raises(EngineRefused):
                await fleet.find("small")[0].start(call, Flight("/test"))
        assert asked == (1 if most_s else 2)
        assert fleet.members["a"].breaker.failures == 0
    finally:
        await fleet.close()
        server.close()
