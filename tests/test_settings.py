"""Settings come from file, environment and flags, each with its place; everything wrong is said at once."""

from __future__ import annotations

import contextlib
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.errors import SettingsError
from tidegate.core.settings import MASK, shown
from tidegate.core.toml import dotted, key_path, line_numbers, notation
from tidegate.settings import PROFILES, load


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without a tidegate.toml, so that only what a test gives counts."""
    monkeypatch.chdir(tmp_path)


def write(text: str) -> Path:
    Path("my.toml").write_text(text, "utf-8")
    return Path("my.toml")


def refused(path: Path | None = None, env: dict[str, str] | None = None, overrides: dict[str, Any] | None = None) -> SettingsError:
    with pytest.raises(SettingsError) as raised:
        load(path, env or {}, overrides)
    return raised.value


ENGINE = '[engines.local]\nurl = "http://127.0.0.1:9"\nmodels = ["m"]\n'


# -- layers --


def test_nothing_given_is_all_defaults() -> None:
    """Every setting is in the provenance, and comes from its default."""
    settings = load(None, {})
    assert {source for _, source in settings.provenance.values()} == {"default"}
    assert settings.provenance["server.port"] == (8080, "default")


def test_a_profile_stands_in_the_place_of_defaults() -> None:
    """Its values hold where nothing else is given, wherever the profile itself is; each says that it is the profile's."""
    path = write('[budgets]\nprofile = "embedded"\nfirst_token_s = 9\n')
    settings = load(path, {})
    assert settings.provenance["budgets.first_token_s"] == (9.0, "my.toml:3")
    assert settings.provenance["budgets.retrieve_s"] == (2.0, "profile embedded")
    assert settings.provenance["admission.forecast_s"] == (60.0, "profile embedded")
    again = load(path, {"TIDEGATE_ADMISSION__FORECAST_S": "5"}, {"budgets.profile": "gpu"})
    assert (again.budgets.retrieve_s, again.budgets.first_token_s, again.admission.forecast_s) == (0.2, 9.0, 5.0)


@pytest.mark.parametrize("name", list(PROFILES))
def test_the_values_of_a_profile_are_settings(name: str) -> None:
    """Each is one that exists, and the profile `gpu` is what the defaults say."""
    settings = load(None, {}, {"budgets.profile": name}).provenance
    assert {dotted(path): value for path, value in PROFILES[name].items()}.items() <= {key: one for key, (one, _) in settings.items()}.items()
    assert name != "gpu" or all(load(None, {}).provenance[dotted(path)] == (value, "default") for path, value in PROFILES[name].items())


def test_an_unknown_profile_is_refused_by_name() -> None:
    """With those that there are."""
    error = refused(overrides={"budgets.profile": "tpu"})
    assert error.message == "flag: budgets.profile is \"tpu\", but should be 'gpu' or 'embedded'."
    assert refused(overrides={"budgets.profile": '"tpu"'}).message == error.message  # as TOML writes it


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ("slots = 2", '[tenants.acme] has slots, which isolation = "shared" has no use for.'),
        ('isolation = "slots"', '[tenants.acme] has isolation = "slots", which needs a number of slots.'),
        ('isolation = "slots"\nslots = 1\ninstances = ["a"]', '[tenants.acme] has instances, which isolation = "slots" has no use for.'),
        ('isolation = "instance"', '[tenants.acme] has isolation = "instance", which needs the names of its instances.'),
        ('isolation = "instance"\ninstances = ["a"]\ncores = [1]', '[tenants.acme] has cores, which isolation = "instance" has no use for.'),
        ('isolation = "device"', '[tenants.acme] has isolation = "device", which needs cores or gpu.'),
        ('isolation = "own"', "tenants.acme.isolation is \"own\", but should be 'shared', 'slots', 'instance' or 'device'."),
        ('isolation = "device"\ncores = [1, 1]', "tenants.acme.cores is [1, 1], but must be different numbers from 0 on."),
    ],
    ids=["no level", "no number", "two levels", "no instance", "a core too many", "no device", "unknown level", "a core twice"],
)
def test_a_level_of_isolation_and_its_settings_go_together(section: str, says: str) -> None:
    """What contradicts itself is refused, with its section and its place."""
    assert says in refused(write(f"[tenants.acme]\n{section}\n")).message


def test_a_section_that_contradicts_itself_says_how() -> None:
    """It is not told to be missing."""
    error = refused(write(ENGINE + 'role = "high_value"\n'))
    assert error.message == 'my.toml:2: [engines.local] role = "high_value" and high_value_for go together: whose requests are they?'


def test_the_later_layer_wins_setting_by_setting() -> None:
    """File, then environment, then flag; what a later layer does not name stays."""
    path = write("[server]\nhost = '::1'\nport = 1\nbacklog = 7\n")
    settings = load(path, {"TIDEGATE_SERVER__PORT": "2", "TIDEGATE_SERVER__BACKLOG": "8"}, {"server.backlog": 9, "log.level": None})
    assert settings.provenance["server.host"] == ("::1", "my.toml:2")
    assert settings.provenance["server.port"] == (2, "env TIDEGATE_SERVER__PORT")
    assert settings.provenance["server.backlog"] == (9, "flag")
    assert settings.log.level == "info"


def test_a_file_in_the_current_folder_is_read() -> None:
    """./tidegate.toml needs no flag, and is told."""
    Path("tidegate.toml").write_text("[server]\nport = 5\n")
    settings = load(None, {})
    assert settings.server.port == 5
    assert settings.file == Path("tidegate.toml")


def test_a_variable_finds_the_name_that_the_file_gave() -> None:
    """A variable has neither case nor hyphens: ENGINES__MY_GPU is [engines.My-GPU]."""
    path = write(ENGINE.replace("local", "My-GPU"))
    settings = load(path, {"TIDEGATE_ENGINES__MY_GPU__MAX_IDLE": "3"})
    assert list(settings.engines) == ["My-GPU"]
    assert settings.engines["My-GPU"].max_idle == 3


def test_a_whole_engine_may_come_from_the_environment() -> None:
    """Setting by setting, or as one table; lists as TOML or JSON."""
    one_by_one = load(None, {"TIDEGATE_ENGINES__A__URL": "http://h", "TIDEGATE_ENGINES__A__MODELS": '["\\ud83d\\ude00"]'})
    at_once = load(None, {"TIDEGATE_ENGINES__A": '{url = "http://h", models = ["😀"]}'})
    assert one_by_one.engines == at_once.engines
    assert at_once.provenance["engines.a.url"] == ("http://h", "env TIDEGATE_ENGINES__A")


def test_a_name_alone_counts() -> None:
    """[tenants.acme] with nothing below it makes the tenant known."""
    settings = load(write("[tenants.acme]\n"), {"TIDEGATE_TENANTS__OTHER__KEEP": "true"})
    assert sorted(settings.tenants) == ["acme", "other"]


def test_text_of_digits_stays_text_where_text_is_wanted() -> None:
    """A password of digits is no number, and a host that looks like a number stays as it was typed."""
    settings = load(None, {"TIDEGATE_STORE__DSN": "0012", "TIDEGATE_SERVER__HOST": "1e3", "TIDEGATE_LOCAL__MODEL": "true"})
    assert (settings.store.dsn, settings.server.host, settings.local.model) == ("0012", "1e3", "true")


def test_what_kubernetes_sets_is_no_setting() -> None:
    """A Service called tidegate puts such variables into every pod beside it."""
    load(None, {
        "TIDEGATE_PORT": "tcp://10.0.0.1:80", "TIDEGATE_SERVICE_HOST": "10.0.0.1", "TIDEGATE_SERVICE_PORT_HTTP": "80",
        "TIDEGATE_PORT_80_TCP_ADDR": "10.0.0.1", "TIDEGATE_URL": "x", "TIDEGATE_KEY": "y", "OTHER": "z",
    })


# -- refusals --


def test_everything_wrong_is_said_at_once() -> None:
    """Three mistakes in three places are three sentences, each with its place."""
    path = write('[server]\nport = "http"\n\n[store]\npool_min = -1\n')
    error = refused(path, {"TIDEGATE_LOG__LEVEL": "loud"})
    assert error.message.splitlines() == [
        'my.toml:2: server.port is "http", but should be a valid integer.',
        "my.toml:5: store.pool_min is -1, but should be greater than or equal to 0.",
        "env TIDEGATE_LOG__LEVEL: log.level is \"loud\", but should be 'debug', 'info', 'warning' or 'error'.",
    ]
    assert error.hint is not None
    assert "server.port: Port that the gateway listens on" in error.hint


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("[server]\nprot = 1\n", "my.toml:2: [server] has no setting 'prot'.", "Did you mean 'port'?"),
        ("[sever]\nport = 1\n", "my.toml:1: There is no section or setting 'sever'.", "Did you mean 'server'?"),
        ("[server]\ndsn = 'x'\n", "my.toml:2: [server] has no setting 'dsn'.", "Did you mean store.dsn?"),
        ("[engines.a]\nurll = 'x'\n", "my.toml:2: [engines.a] has no setting 'urll'.", "Did you mean 'url'?"),
        ("[engines.a]\nurl = 'http://h'\n", "my.toml:2: engines.a.models is missing.", "give it a value"),
        ("server = 3\n", "my.toml:1: server is 3, but should be a table.", None),
        ("[tenants]\nacme = 3\n", "my.toml:2: tenants.acme is 3, but should be a table.", None),
        ("[[server]]\nport = 3\n", "my.toml:1: server is [{port = 3}], but should be a table.", None),
        ('[guard]\nterms_file = "a\\u0000b"\n', 'my.toml:2: guard.terms_file is "a\\u0000b", but must not hold a NUL character.', "File of terms"),
        ("[server]\nbacklog = 99999999999\n", "my.toml:2: server.backlog is 99999999999, but should be less than or equal to 2147483647.", None),
    ],
)
def test_a_mistake_in_the_file_is_named(text: str, says: str, hint: str | None) -> None:
    """With file, line, and the nearest known name."""
    error = refused(write(text))
    assert error.message == says
    assert (hint or "") in (error.hint or "")


def test_an_unknown_variable_is_refused_and_told_how_settings_are_called() -> None:
    """TIDEGATE_PORT is meant as server.port, and would otherwise do nothing."""
    error = refused(env={"TIDEGATE_PORT": "9000"})
    assert "env TIDEGATE_PORT" in error.message
    assert error.hint is not None
    assert "server.port" in error.hint
    assert "TIDEGATE_SECTION__NAME" in error.hint


def test_an_unknown_override_is_refused() -> None:
    """Also one that is no name at all."""
    assert "'prt'" in refused(overrides={"server.prt": 1}).message
    assert refused(overrides={"= 3": 1}).message.startswith("flag:")


def test_a_secret_is_never_quoted() -> None:
    """An error shows a value without the password that it holds."""
    error = refused(write("[store]\ndsn = 3\n[engines.a]\nurl = 'http://u:hunter2@h'\nmodels = ['m']\napi_key = ['hunter2']\n"))
    assert "hunter2" not in error.message
    assert MASK in error.message


@pytest.mark.parametrize("content", [b"[server\n", b"port = \n", b"a = 1\na = 2\n", b"\xff\xfe", b"\x00"])
def test_a_file_that_is_no_toml_is_refused(content: bytes) -> None:
    """With the file's name, and never a traceback."""
    Path("my.toml").write_bytes(content)
    assert "my.toml is not" in refused(Path("my.toml")).message


def test_a_file_that_is_not_there_is_refused() -> None:
    """A named file must exist; a folder is none."""
    assert "none.toml cannot be read" in refused(Path("none.toml")).message
    assert "cannot be read" in refused(Path()).message


# -- showing and writing --


@pytest.mark.parametrize(
    ("name", "value", "seen"),
    [
        ("dsn", "postgres://u:p%40w@h/db", "postgres://u:***@h/db"),
        ("dsn", "host=h password='a b' user=u", "host=h password=*** user=u"),
        ("dsn", "host=h password=ab user=u", "host=h password=*** user=u"),
        ("dsn", "postgres://h/db", "postgres://h/db"),
        ("api_key", "abc", MASK),
        ("api_key", "", ""),
        ("max_tokens", 3, 3),
        ("tokens", "abc", "abc"),
        ("models", {"a": "b"}, {"a": "b"}),
        ("socket", Path("/x"), "/x"),
        ("socket", None, None),
    ],
)
def test_secrets_are_masked_and_nothing_else(name: str, value: Any, seen: Any) -> None:
    """The value of a secret, and the password in an address; the rest stays readable."""
    assert shown(name, value) == seen


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
PLAIN = TEXT.filter(lambda text: "\0" not in text)  # NUL is refused
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=5,
)


@given(VALUES)
def test_toml_notation_is_read_back(value: Any) -> None:
    """Whatever the value, tomllib reads what `notation` wrote."""
    assert tomllib.loads(f"v = {notation(value)}") == {"v": value}


@given(st.lists(TEXT, min_size=1, max_size=4))
def test_a_dotted_name_is_a_path_again(path: list[str]) -> None:
    """Names with dots, quotes and line ends survive."""
    assert key_path(dotted(path)) == tuple(path)


@given(PLAIN)
def test_any_text_in_a_variable_is_that_text(text: str) -> None:
    """For a setting of text: read as TOML where it is a TOML text, else taken as it is; never refused, never changed in kind."""
    value = load(None, {"TIDEGATE_LOCAL__MODEL": text}).local.model
    assert value == text or notation(value) == text or text.strip()[:1] in ("'", '"')


@given(PLAIN, st.integers(0, 65535), st.booleans())
def test_quoted_values_round_trip_through_the_environment(text: str, port: int, keep: bool) -> None:
    """What is written in TOML's notation arrives as it was."""
    env = {"TIDEGATE_STORE__DSN": notation(text), "TIDEGATE_SERVER__PORT": notation(port), "TIDEGATE_TENANTS__T__KEEP": notation(keep)}
    settings = load(None, env)
    assert (settings.store.dsn, settings.server.port, settings.tenants["t"].keep) == (text, port, keep)


@given(st.text(st.sampled_from('[]="\'a.\n# {}1'), max_size=60))
def test_any_file_is_read_or_refused(text: str) -> None:
    """No text makes the reader raise anything but SettingsError."""
    line_numbers(text)
    with contextlib.suppress(SettingsError):
        load(write(text), {})


@given(st.dictionaries(st.text(st.sampled_from("SERVLOGTNA_"), max_size=14).map("TIDEGATE_".__add__), TEXT, max_size=3))
def test_any_environment_is_read_or_refused(env: dict[str, str]) -> None:
    """No variable makes the reader raise anything but SettingsError."""
    with contextlib.suppress(SettingsError):
        load(None, env)


def test_the_provenance_can_be_written_as_json() -> None:
    """As `tidegate settings --json` does."""
    settings = load(None, {"TIDEGATE_EMBEDDER__SOCKET": "/run/x.sock"})
    told = {name: shown(name, value) for name, (value, _) in settings.provenance.items()}
    assert json.loads(json.dumps(told))["embedder.socket"] == "/run/x.sock"
