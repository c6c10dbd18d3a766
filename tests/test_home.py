"""What `tidegate up` gives its gateway."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidegate.core.errors import SettingsError
from tidegate.home import _Home, slices_of
from tidegate.local.engine import EngineAddress
from tidegate.local.plan import Running
from tidegate.local.slices import Slice
from tidegate.settings import load

ENGINE: dict[str, object] = {"engines.mine.url": "http://127.0.0.1:2", "engines.mine.models": ["big"], "engines.mine.api_key": "secret"}


def command_of(tmp_path: Path, overrides: dict[str, object]) -> tuple[list[str], dict[str, str]]:
    settings = load(None, {}, {"local.data": str(tmp_path), **overrides})
    engine = EngineAddress("http://127.0.0.1:1", "engine-key", "tiny", 4, 2048)
    small = EngineAddress("http://127.0.0.1:3", "small-key", "small", 2, 2048)
    own = {one.name: EngineAddress(f"http://127.0.0.1:{n}", f"key {n}", "tiny", 4, 2048) for n, one in enumerate(slices_of(settings), 5)}
    command = _Home(settings, tmp_path).gateway(Running(tmp_path, "postgresql:///x", engine, tmp_path / "e.sock", small, own), 7)
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


def test_a_tenants_engine_reaches_the_gateway_as_its_own(tmp_path: Path) -> None:
    """Each tenant with cores or a GPU has an engine by a name that is free, and is told to be served by that alone, however it is written."""
    config = tmp_path / "tidegate.toml"
    config.write_text(
        '[engines.own1]\nurl = "http://127.0.0.1:2"\nmodels = ["big"]\n[tenants."Acme & Sons"]\nisolation = "device"\ncores = [1, 3]\n'
        '[tenants.bolt]\nisolation = "device"\ngpu = "MIG-1"\n'
    )
    settings = load(config, {}, {"local.data": str(tmp_path)})
    assert slices_of(settings) == [Slice("own2", "Acme & Sons", (1, 3)), Slice("own3", "bolt", gpu="MIG-1")]
    own = {name: EngineAddress(f"http://127.0.0.1/{name}", f"key of {name}", "tiny", 4, 2048) for name in ("own2", "own3")}
    command = _Home(settings, tmp_path).gateway(Running(tmp_path, "postgresql:///x", None, None, None, own), 7)
    argv = list(command.argv)
    sets = dict(argv[at + 1].split("=", 1) for at, word in enumerate(argv) if word == "--set")
    seen = load(config, dict(command.env), sets)
    assert {name: one.instances for name, one in seen.tenants.items()} == {"Acme & Sons": ["own2"], "bolt": ["own3"]}
    key = seen.engines["own2"].api_key
    assert key is not None
    assert (key.get_secret_value(), seen.engines["own2"].slots, seen.engines["own1"].model_names) == ("key of own2", 4, {"big": "big"})
    assert "key of" not in " ".join(argv)


@pytest.mark.parametrize(
    ("more", "says"),
    [({"local.engine": False}, "local.engine is false"), ({"tenants.acme.instances": ["a"]}, "has instances, and cores or a gpu")],
    ids=["no engine", "instances too"],
)
def test_a_tenants_engine_that_cannot_be_is_refused_by_name(tmp_path: Path, more: dict[str, object], says: str) -> None:
    """Before anything starts."""
    settings = load(None, {}, {"local.data": str(tmp_path), "tenants.acme.isolation": "device", "tenants.acme.cores": [1], **more})
    with pytest.raises(SettingsError, match=says) as refused:
        slices_of(settings)
    assert "[tenants.acme]" in refused.value.message


@pytest.mark.parametrize(
    ("folders", "asks"), [(None, "support/answer"), (["mine", "examples/capabilities"], "support/answer"), (["mine"], "/v1/chat/completions")]
)
def test_the_printed_line_asks_the_examples_where_they_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folders: list[str] | None, asks: str
) -> None:
    """Also beside folders of one's own; their documents are loaded by the same rule."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "examples")
    settings = load(None, {}, {"local.data": str(tmp_path / "data"), **({"capabilities.folders": folders} if folders else {})})
    engine = EngineAddress("http://127.0.0.1:1", "engine-key", "tiny", 4, 2048)
    running = Running(tmp_path, "postgresql:///x", engine, tmp_path / "e.sock", None, {})
    assert asks in _Home(settings, tmp_path / "link").curl("http://127.0.0.1:8080", "tg_x", running)
