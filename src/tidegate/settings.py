"""All settings: composed of the rooms' own, read from file, environment and command line, each with the place that it came from."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from pydantic import Field, PrivateAttr, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from tidegate.admission.settings import AdmissionSettings, ClassSettings, LimitSettings, PriceSettings
from tidegate.api.settings import ServerSettings, StreamSettings, TenantSettings
from tidegate.core.errors import SettingsError
from tidegate.core.plugins import nearest
from tidegate.core.settings import Leaf, Section, fits, inner, leaves, shown, values
from tidegate.core.toml import KeyPath, dotted, key_path, line_numbers, notation
from tidegate.engines.settings import EngineSettings, FleetSettings
from tidegate.guard.settings import DoorSettings, GuardSettings
from tidegate.local.settings import LocalSettings
from tidegate.pipeline.settings import BudgetSettings, CapabilitySettings, GenerationSettings, LengthSettings
from tidegate.retrieval.settings import EmbedderSettings, RetrievalSettings
from tidegate.stores.settings import QdrantSettings, SpoolSettings, StoreSettings, ValkeySettings
from tidegate.telemetry.settings import LogSettings

#: The profiles of `[budgets]`: values in the place of defaults, for settings that lie in several rooms.
PROFILES: dict[str, dict[KeyPath, float]] = {
    "gpu": {("budgets", "retrieve_s"): 0.2, ("budgets", "first_token_s"): 0.8, ("admission", "forecast_s"): 3.0},
    "embedded": {("budgets", "retrieve_s"): 2.0, ("budgets", "first_token_s"): 30.0, ("admission", "forecast_s"): 60.0},
}
#: The profile that `tidegate up` takes for its own engine, where none is set: on a processor an answer takes seconds.
EMBEDDED = "embedded"
DEFAULT_FILE = "tidegate.toml"
ENV_PREFIX = "TIDEGATE_"
#: Variables of the command line's own, no settings: where a running gateway is, and the key to ask it with.
CLIENT_ENV = frozenset({"TIDEGATE_URL", "TIDEGATE_KEY"})
#: Kubernetes sets these in every pod beside a Service that is called "tidegate".
_KUBERNETES = re.compile(r"TIDEGATE_(SERVICE_(HOST|PORT.*)|PORT(_\d+_(TCP|UDP).*)?)")


class Settings(Section):
    """The whole of tidegate.toml."""

    server: ServerSettings = Field(default_factory=ServerSettings, description="The gateway's own door.")
    streams: StreamSettings = Field(default_factory=StreamSettings, description="What happens when a client leaves, comes back or reads slowly.")
    tenants: dict[str, TenantSettings] = Field({}, description="What is kept of a tenant's traffic, and what is its own, by its name.")
    limits: LimitSettings = Field(
        default_factory=lambda: LimitSettings.model_validate({}), description="What keys, tenants and capabilities may use."
    )
    prices: dict[str, PriceSettings] = Field({}, description="What models cost, by their public names.")
    admission: AdmissionSettings = Field(
        default_factory=lambda: AdmissionSettings.model_validate({}), description="How long requests may wait for a slot of an engine, and how many."
    )
    budgets: BudgetSettings = Field(
        default_factory=lambda: BudgetSettings.model_validate({}), description="How the one deadline of a request is cut among its stages."
    )
    classes: dict[str, ClassSettings] = Field({}, description="Classes of callers with a weight, by a name of your choice.")
    guard: GuardSettings = Field(default_factory=lambda: GuardSettings.model_validate({}), description="What no answer may say.")
    door: DoorSettings = Field(default_factory=lambda: DoorSettings.model_validate({}), description="What the texts of a request may hold.")
    length: LengthSettings = Field(
        default_factory=lambda: LengthSettings.model_validate({}), description="What happens to a prompt of /v1 that is too long."
    )
    generation: GenerationSettings = Field(
        default_factory=lambda: GenerationSettings.model_validate({}), description="How answers are told, and go on where they broke off."
    )
    capabilities: CapabilitySettings = Field(default_factory=CapabilitySettings, description="Where your capabilities are.")
    engines: dict[str, EngineSettings] = Field(
        {}, description="Engines that answer, by a name of your choice; none: the one that `tidegate up` starts."
    )
    fleet: FleetSettings = Field(
        default_factory=lambda: FleetSettings.model_validate({}), description="How the engines of one model share its requests."
    )
    embedder: EmbedderSettings = Field(default_factory=EmbedderSettings, description="The model that turns text into vectors.")
    retrieval: RetrievalSettings = Field(default_factory=RetrievalSettings, description="Which passages are found for a question.")
    store: StoreSettings = Field(default_factory=StoreSettings, description="The database.")
    valkey: ValkeySettings = Field(
        default_factory=lambda: ValkeySettings.model_validate({}), description="What several machines share: the count of their limits."
    )
    qdrant: QdrantSettings = Field(
        default_factory=lambda: QdrantSettings.model_validate({}), description="Where passages are, if not in the database."
    )
    spool: SpoolSettings = Field(default_factory=SpoolSettings, description="Finished flights on their way to the database.")
    log: LogSettings = Field(default_factory=LogSettings, description="What the process says on stderr.")
    local: LocalSettings = Field(default_factory=LocalSettings, description="The parts that `tidegate up` runs on this machine.")

    _sources: dict[KeyPath, str] = PrivateAttr(default_factory=dict)
    _file: Path | None = PrivateAttr(default=None)

    @property
    def file(self) -> Path | None:
        """The file that was read; None where there was none."""
        return self._file

    @property
    def provenance(self) -> dict[str, tuple[Any, str]]:
        """Every setting in force by its dotted name: its value, and `default`, `profile NAME`, `FILE:LINE`, `env NAME` or `flag`."""
        return {dotted(path): (value, self._sources.get(path, "default")) for path, value in values(self)}


class Given(NamedTuple):
    """A value as it was given, and where. `raw`: the text where it came as text, whose type only its field can tell."""

    value: Any
    source: str
    raw: str | None = None


class Problem(NamedTuple):
    """One thing that is wrong."""

    says: str
    hint: str = ""


def load(path: Path | str | None, env: Mapping[str, str], overrides: Mapping[str, Any] | None = None) -> Settings:
    """The settings in force: defaults, then the profile of `[budgets]`, then the file, then the environment, then `overrides`; the later wins,
    setting by setting.

    `path`: the file; None reads ./tidegate.toml where it is. `env`: TIDEGATE_SECTION__NAME variables; a value is read as TOML or JSON, and
    as plain text where it is neither. `overrides`: dotted name -> value (text is read as in `env`); None means "not given".

    Raises SettingsError that lists everything that is wrong, each with its place and the nearest known name.
    """
    file = _file(path)
    given: dict[KeyPath, Given] = {}
    problems: list[Problem] = []
    for layer in (_from_file(file), _from_env(env, given), _from_flags(overrides or {})):
        for found in layer:
            if isinstance(found, Problem):
                problems.append(found)
            else:
                given[found[0]] = found[1]
    _refuse(problems)
    _profile(given)
    settings = _validate(given)
    settings._file = file
    settings._sources = {path: one.source for path, one in given.items()}
    return settings


def all_leaves() -> list[Leaf]:
    """Every setting that there is."""
    return list(leaves(Settings))


# -- the layers --

_Found = Iterator[Problem | tuple[KeyPath, Given]]


def _file(path: Path | str | None) -> Path | None:
    if path is not None:
        return Path(path)
    return Path(DEFAULT_FILE) if Path(DEFAULT_FILE).is_file() else None


def _from_file(file: Path | None) -> _Found:
    if file is None:
        return
    try:
        text = file.read_text("utf-8")
        tree = tomllib.loads(text)
    except OSError as error:
        raise SettingsError(f"The settings file {file} cannot be read: {error.strerror}.", hint="Name another with --config.") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"The settings file {file} is not UTF-8 (byte {error.start}).", hint="Save it as UTF-8.") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"The settings file {file} is not TOML: {error}.", hint='Text needs quotes: name = "value".') from error
    lines = line_numbers(text)

    def source(path: KeyPath) -> str:
        known = next((lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in lines), None)
        return f"{file}:{known}" if known else str(file)

    for found in _flatten(Settings, tree, ()):
        path, value = found
        yield _unknown(path, source(path)) if value is _UNKNOWN else (path, Given(value, source(path)))


def _from_env(env: Mapping[str, str], given: Mapping[KeyPath, Given]) -> _Found:
    for name in sorted(env):
        if not name.startswith(ENV_PREFIX) or name in CLIENT_ENV or _is_from_kubernetes(name, env[name]):
            continue
        path = tuple(name.removeprefix(ENV_PREFIX).lower().split("__"))
        yield from _from_text(_as_named(path, given), env[name], f"env {name}")


def _as_named(path: KeyPath, given: Mapping[KeyPath, Given]) -> KeyPath:
    """TIDEGATE_ENGINES__MY_GPU__URL means [engines.My-GPU] where the file has that: a variable's name has neither case nor hyphens."""
    same = (one[1] for one in given if len(one) > 1 and len(path) > 1 and one[0] == path[0] and _plain(one[1]) == _plain(path[1]))
    return (path[0], next(same, path[1]), *path[2:]) if len(path) > 1 else path


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _from_flags(overrides: Mapping[str, Any]) -> _Found:
    for name, value in overrides.items():
        if value is None:
            continue
        path = key_path(name)
        if path is None:
            yield _unknown((name,), "flag")
        elif isinstance(value, str):
            yield from _from_text(path, value, "flag")
        else:
            yield from _place(path, value, None, "flag")


def _from_text(path: KeyPath, raw: str, source: str) -> _Found:
    yield from _place(path, _parsed(raw), raw, source)


def _parsed(raw: str) -> Any:
    """Text as a TOML value; as a JSON list or table, which many programs write into variables; else as it is."""
    try:
        value = tomllib.loads(f"v = {raw}\n")
        return value["v"] if value.keys() == {"v"} else raw
    except tomllib.TOMLDecodeError:
        pass
    try:
        return msgspec.json.decode(raw, type=list[Any] | dict[str, Any])
    except (msgspec.DecodeError, UnicodeError):
        return raw


def _place(path: KeyPath, value: Any, raw: str | None, source: str) -> _Found:
    tree: Any = value
    for name in reversed(path):
        tree = {name: tree}
    for found, leaf in _flatten(Settings, tree, ()):
        # The raw text belongs to the setting that was named; a table given as text (a whole engine) was parsed already.
        yield _unknown(found, source) if leaf is _UNKNOWN else (found, Given(leaf, source, raw if found == path else None))


_UNKNOWN = object()


def _flatten(section: type[Section], tree: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Leaves of a tree as the settings' own shape has them; _UNKNOWN for a name that they do not know.

    A leaf stands in the place of a section where a table was expected and none was given: its type is refused by the validation.
    """
    if not isinstance(tree, dict):
        yield path, tree
        return
    for name, value in tree.items():
        field = section.model_fields.get(name)
        here = (*path, name)
        if field is None:
            yield here, _UNKNOWN
            continue
        below, named = inner(field)
        if below is None:
            yield here, value
        elif not named:
            yield from _flatten(below, value, here)
        elif isinstance(value, dict):
            for key, one in value.items():
                # A name alone says something too: [tenants.acme] with nothing below it.
                yield from _flatten(below, one, (*here, key)) if one else iter([((*here, key), one)])
        else:
            yield here, value


def _is_from_kubernetes(name: str, value: str) -> bool:
    # A person who writes TIDEGATE_PORT=9000 means a setting and must be told its name; Kubernetes writes tcp://10.0.0.1:80.
    return _KUBERNETES.fullmatch(name) is not None and (name != "TIDEGATE_PORT" or "://" in value)


def _profile(given: dict[KeyPath, Given]) -> None:
    """Put the values of the profile that was chosen where nothing else was given; one that does not exist is refused as any wrong value is."""
    chosen = given.get(("budgets", "profile"))
    if chosen is not None and isinstance(chosen.value, str):
        for path, value in PROFILES.get(chosen.value, {}).items():
            given.setdefault(path, Given(value, f"profile {chosen.value}"))


# -- judging --


def _validate(given: Mapping[KeyPath, Given]) -> Settings:
    tree: dict[str, Any] = {}
    for path, one in given.items():
        _put(tree, path, _by_type(path, one))
    try:
        # JSON's strict mode: types as TOML tells them, no guessing, and lists fit every kind of sequence.
        return Settings.model_validate_json(msgspec.json.encode(tree), strict=True)
    except ValidationError as invalid:
        _refuse(_problems(invalid, given))
        raise  # unreachable: an invalid tree has a problem


def _put(tree: dict[str, Any], path: KeyPath, value: Any) -> None:
    for name in path[:-1]:
        below = tree.setdefault(name, {})
        if not isinstance(below, dict):  # a scalar where a section belongs: the validation says so
            return
        tree = below
    if value == {}:  # a name alone, maybe beside settings of its own
        tree.setdefault(path[-1], {})
    else:
        tree[path[-1]] = value


def _by_type(path: KeyPath, one: Given) -> Any:
    """Text stays text where its field wants text: a password of digits is no number."""
    if one.raw is None or isinstance(one.value, str):
        return one.value
    field = _field(path)
    try:
        TypeAdapter[Any](field.annotation if field and field.annotation else Any).validate_json(msgspec.json.encode(one.value), strict=True)
    except ValidationError:
        return one.raw
    return one.value


def _field(path: KeyPath) -> FieldInfo | None:
    return next((leaf.field for leaf in all_leaves() if leaf.fits(path)), None)


def _problems(invalid: ValidationError, given: Mapping[KeyPath, Given]) -> list[Problem]:
    by_path: dict[KeyPath, list[str]] = {}
    for error in invalid.errors(include_url=False):
        loc = tuple(str(step) for step in error["loc"])
        path = loc if error["type"] == "missing" else next((loc[:n] for n in range(len(loc), 0, -1) if loc[:n] in given), loc)
        by_path.setdefault(path, []).append("" if error["type"] == "missing" else _said(error["msg"]))
    problems = []
    for path, said in by_path.items():
        one = given.get(path)
        if one is None:
            inside = [words for words in said if words]
            depth = len(path) if inside else len(path) - 1
            source = next((other.source for where, other in given.items() if where[:depth] == path[:depth]), "")
            if inside:  # what contradicts itself is a whole section
                problems += [Problem(f"{source}: [{dotted(path)}] {words}{'' if words.endswith('?') else '.'}") for words in inside]
            else:
                problems.append(Problem(f"{source}: {dotted(path)} is missing.", "It has no default: give it a value."))
        else:
            # As it was given, but text that came in quotes, as in --set 'log.level="loud"', does not get a second pair.
            value = notation(shown(path[-1], one.value if one.raw is None or isinstance(one.value, str) else one.raw))
            problems.append(Problem(f"{one.source}: {dotted(path)} is {value}, but {' or '.join(dict.fromkeys(said))}.", _about(path)))
    return problems


def _said(message: str) -> str:
    """Pydantic's sentence in ours: "Input should be a valid integer" -> "should be a valid integer"."""
    return message.removeprefix("Input ").removeprefix("Value error, ").replace("an object", "a table").replace("a valid array", "a list")


def _about(path: KeyPath) -> str:
    field = _field(path)
    return f"{dotted(path)}: {field.description}" if field and field.description else ""


def _unknown(path: KeyPath, source: str) -> Problem:
    known = [leaf.path for leaf in all_leaves()]
    depth = len(path) - 1
    here = {one[depth] for one in known if len(one) > depth and fits(one[:depth], path[:depth])} - {"NAME"}
    elsewhere = [dotted(one) for one in known if one[-1] == path[-1]]
    where = f"[{dotted(path[:-1])}] has no setting" if depth else "There is no section or setting"
    hint = f"Did you mean {' or '.join(elsewhere)}?" if elsewhere else nearest(path[-1], here) if here else "See docs/settings.md."
    if source.startswith("env "):
        hint += f" In the environment a setting is called {ENV_PREFIX}SECTION__NAME."
    return Problem(f"{source}: {where} {path[-1]!r}.", hint)


def _refuse(problems: list[Problem]) -> None:
    if problems:
        hints = dict.fromkeys(problem.hint for problem in problems if problem.hint)
        raise SettingsError("\n".join(problem.says for problem in problems), hint="\n".join(hints) or None)


