"""What `tidegate up` gives its gateway."""

from __future__ import annotations

from pathlib import Path

from tidegate.home import _Home
from tidegate.local.engine import EngineAddress
from tidegate.local.plan import Running
from tidegate.settings import load

ENGINE: dict[str, object] = {"engines.mine.url": "http://127.0.0.1:2", "engines.mine.models": ["big"], "engines.mine.api_key": "secret"}


def command_of(tmp_path: Path, overrides: dict[str, object]) -> tuple[list[str], dict[str, str]]:
    settings = load(None, {}, {"local.data": str(tmp_path), **overrides})
    engine = EngineAddress("http://127.0.0.1:1", "engine-key", "tiny", 4, 2048)
    small = EngineAddress("http://127.0.0.1:3", "small-key", "small", 2, 2048)
    command = _Home(settings, tmp_path).gateway(Running(tmp_path, "postgresql:///x", engine, tmp_path / "e.sock", small), 7)
    return list(command.argv), dict(command.env)


def test_flags_reach_the_gateway(tmp_path: Path) -> None:
    """What was set on the command line of `up` is in force in its gateway, read back by the same settings."""
    _, env = command_of(tmp_path, {"limits.requests_per_minute": 7, "log.level": "warning", "tenants.acme.keep": True, **ENGINE})
    seen = load(None, env, {})
    key = seen.engines["mine"].api_key
    assert key is not None
    assert key.get_secret_value() == "secret"
    assert (seen.limits.requests_per_minute, seen.log.level, seen.tenants["acme"].keep) == (7, "warning", True)


def test_the_parts_reach_the_gateway_and_no_secret_is_an_argument(tmp_path: Path) -> None:
    """Database, engine and embedder are settings of the gateway; keys travel in the environment, which others cannot read."""
    argv, env = command_of(tmp_path, {})
    seen = load(None, env, {})
    assert seen.store.dsn == "postgresql:///x"
    assert seen.engines["local"].url == "http://127.0.0.1:1"
    assert seen.engines["local"].model_names == {"tiny": "tiny"}
    assert seen.engines["small"].model_names == {"small": "small"}
    assert next(iter(seen.engines)) == "local", "the first engine has the default model"
    assert seen.embedder.socket == tmp_path / "e.sock"
    assert not any("key" in word for word in argv)


def test_the_embedded_engine_has_its_slots_and_a_patient_forecast(tmp_path: Path) -> None:
    """The gateway sends the embedded engine no more than it answers at once, and lets requests wait for a minute; a bound of one's own holds."""
    _, env = command_of(tmp_path, {})
    seen = load(None, env, {})
    assert (seen.engines["local"].slots, seen.engines["small"].slots, seen.admission.forecast_s) == (4, 2, 60.0)
    assert (seen.budgets.profile, seen.budgets.first_token_s) == ("embedded", 30.0)
    _, env = command_of(tmp_path, {"admission.forecast_s": 7})
    assert load(None, env, {}).admission.forecast_s == 7.0
    _, env = command_of(tmp_path, {"budgets.profile": "gpu"})
    assert load(None, env, {}).admission.forecast_s == 3.0
