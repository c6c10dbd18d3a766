"""Loads a capability: the user's folder, checked once at start-up so that a request never meets a broken one.

    GROUP/NAME/capability.toml            stages, budgets, model, retrieval and generation
    GROUP/NAME/input.schema.json          business fields in: types, enums, cross-field rules
    GROUP/NAME/output.schema.json         business fields out
    GROUP/NAME/prompts/VERSION/template.jinja   blocks `system` and `user`
    GROUP/NAME/TERMS                      terms that its answers must not hold, where guard.terms_file names one
    GROUP/NAME/FAQ                        answers by keywords, where faq.file names one
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jinja2
import jinja2.sandbox
import jsonschema_rs
from pydantic import Field, ValidationError

from tidegate.core.errors import InputInvalid, OutputInvalid, SettingsError
from tidegate.core.nesting import MAX_DEPTH
from tidegate.core.plugins import names, nearest
from tidegate.core.settings import Section, inner
from tidegate.guard.door import Action
from tidegate.guard.terms_file import read_terms
from tidegate.pipeline.faq import Faq, read_faq
from tidegate.pipeline.rungs import Rung, check_ladder
from tidegate.pipeline.settings import BudgetSettings, LengthSettings, ShardSettings
from tidegate.retrieval.rerank import known_rerankers

#: Engines count tokens in signed 32-bit numbers.
_MAX_TOKEN_ID = 2**31 - 1
_ALL_NAMES = "docs/capabilities.md lists every name."


class Budgets(Section):
    """Seconds that a stage, the first token and the whole may take."""

    retrieve_s: float = Field(0.0, ge=0, description="Seconds that retrieval may take; 0: as `[budgets]` of tidegate.toml says.")
    first_token_s: float = Field(0.0, ge=0, description="Seconds from the engine's call to its first token; 0: as `[budgets]` says.")
    total_s: float = Field(120.0, gt=0, description="Seconds that the whole request may take.")
    full_share: float = Field(
        0.0, ge=0, le=1,
        description="Most of the time that the full answer may take where there is a ladder; 0: 0.6, or 0.95 where no rung needs an engine.",
    )


class Retrieve(Section):
    """What is searched, and for what."""

    collection: str = Field("default", description="The collection that is searched.")
    question: str = Field("question", description="The input field whose text is searched for.")
    k: int = Field(4, ge=1, le=50, description="How many passages go into the prompt.")
    min_score: float = Field(
        0.0, ge=0, le=1,
        description="Passages below this cosine similarity are left out, unless they hold most of the weight of the question's words.",
    )
    hybrid: bool | None = Field(None, description="Whether words find passages too; without it as `[retrieval]` of tidegate.toml says.")
    rerank: str = Field("", description="The reranker: features, onnx, http, engine or off; empty: as `[retrieval]` says.")
    compress: bool | None = Field(
        None, description="Whether sentences that do not bear on the question stay out of the prompt; without it as `[retrieval]` says."
    )
    tags_from: dict[str, str] = Field(default_factory=dict, description="Tag name to input field: only passages with that tag value are searched.")


class Generate(Section):
    """How the model is asked. These never appear in the business fields."""

    max_tokens: int = Field(256, ge=1, description="Most tokens that the model may answer with.")
    temperature: float = Field(0.0, ge=0, le=2, description="Sampling temperature.")
    barge_in: bool = Field(
        False, description="A new message of a conversation (the header `x-tidegate-conversation`) cuts the answer that still runs in it."
    )
    json_schema: bool = Field(False, description="Send the output schema to the engine; the answer is checked again by us in any case.")


class Leave(Section):
    """What happens to a running answer when its client leaves."""

    policy: Literal["cancel", "drain", "keep"] = Field(
        "cancel",
        description="`cancel` frees the engine, `drain` reads a few tokens more, `keep` goes on and holds the rest for a client that comes back.",
    )
    tokens: int = Field(256, ge=1, description="With `drain`: tokens that are still read.")


class CapabilityGuard(Section):
    """Terms that this capability's answers must not hold, beside those of tidegate.toml's [guard]."""

    terms_file: str = Field("", description="File of terms, from the capability's folder on; they are banned beside those of `[guard]`.")
    whole_words: bool = Field(True, description="These terms count as whole words; false: anywhere.")
    on_term: Literal["as_set", "step_back", "stop"] = Field("as_set", description="What happens at a banned term; `as_set`: as `[guard]` says.")
    max_step_backs: int = Field(-1, ge=-1, description="Steps back in one answer; -1: as `[guard]` says.")


class FaqSettings(Section):
    """Answers to frequent questions."""

    file: str = Field("", description="File of answers by keywords, from the capability's folder on; the rung and the stage `faq` use it.")
    question: str = Field("", description="The input field that holds the question; empty: that of `retrieve.question`.")


class CapabilityDoor(Section):
    """What the business fields may hold, where it is not as `[door]` of tidegate.toml says."""

    max_chars: int = Field(-1, ge=-1, description="Most characters of all texts together; 0: any number; -1: as `[door]` says.")
    max_depth: int = Field(0, ge=0, le=MAX_DEPTH, description="How deep lists and objects may lie in each other; 0: as `[door]` says.")
    control: Action | Literal["as_set"] = Field("as_set", description="Control characters: pass, mark or refuse; `as_set`: as `[door]` says.")
    invisible: Action | Literal["as_set"] = Field("as_set", description="Characters that reorder a text or that nobody sees.")
    encoding: Action | Literal["as_set"] = Field("as_set", description="A text read in a wrong encoding.")
    blob: Action | Literal["as_set"] = Field("as_set", description="Long runs of encoded data.")
    blob_chars: int = Field(0, ge=0, description="Characters from which a run of encoded data counts; 0: as `[door]` says.")
    repetition: Action | Literal["as_set"] = Field("as_set", description="One passage over and over.")
    repeat_chars: int = Field(0, ge=0, description="Characters from which repetition counts; 0: as `[door]` says.")
    injection: Action | Literal["as_set"] = Field("as_set", description="Usual phrases of prompt injection.")


class TriggerSettings(Section):
    """A sequence that stops the generation and starts a stage."""

    text: str = Field("", description="The sequence as text, compared as it is.")
    token_ids: list[int] = Field(default_factory=list, description="The sequence as token ids, where the engine tells them.")
    stage: str = Field("create_ticket", description="The stage that runs.")
    keep: bool = Field(False, description="The sequence's own text leaves too.")
    then: Literal["go_on", "stop"] = Field("go_on", description="Whether the model goes on behind what was put in.")
    insert: str = Field("{given}", description="What is put into the answer; {given} is what the stage gives.")


class Manifest(Section):
    """capability.toml."""

    description: str = Field("", description="One sentence for people.")
    stages: list[str] = Field(description="Stages in order.")
    prompt: str = Field("v1", description="The prompt version that is used: a folder under prompts/.")
    model: str = Field("default", description="A public model name, or `default`.")
    budgets: Budgets = Field(default_factory=lambda: Budgets.model_validate({}), description="Time shares.")
    retrieve: Retrieve = Field(default_factory=lambda: Retrieve.model_validate({}), description="Retrieval.")
    generate: Generate = Field(default_factory=lambda: Generate.model_validate({}), description="Generation.")
    guard: CapabilityGuard = Field(default_factory=lambda: CapabilityGuard.model_validate({}), description="Terms that are banned.")
    length: LengthSettings = Field(
        default_factory=lambda: LengthSettings.model_validate({}), description="What the stage `fit` does with a prompt that is too long."
    )
    shard: ShardSettings = Field(
        default_factory=lambda: ShardSettings.model_validate({}), description="How the stage `shard` reads a long document in parts."
    )
    door: CapabilityDoor = Field(default_factory=lambda: CapabilityDoor.model_validate({}), description="What the business fields may hold.")
    triggers: list[TriggerSettings] = Field(
        default_factory=list, description="`[[triggers]]`: sequences that stop the generation and start a stage; see below."
    )
    leave: Leave = Field(default_factory=lambda: Leave.model_validate({}), description="What happens when the client leaves.")
    faq: FaqSettings = Field(default_factory=lambda: FaqSettings.model_validate({}), description="Answers to frequent questions.")
    ladder: list[Rung] = Field(default_factory=list, description="`[[ladder]]`: ways to answer where the full one fails; see below.")


@dataclass(frozen=True, slots=True)
class Capability:
    """A loaded capability. `path` is "GROUP/NAME"; `sha256` covers every file that shapes its answers; `budgets` are those in force."""

    path: str
    manifest: Manifest
    budgets: Budgets
    input_schema: dict[str, Any]
    output_schema: dict[str, Any]
    prompt_sha256: str
    sha256: str
    template: jinja2.Template
    #: Of its own terms file.
    terms: list[str]
    faq: Faq | None
    _input: jsonschema_rs.Validator
    _output: jsonschema_rs.Validator

    @property
    def streams(self) -> bool:
        """Whether text may leave before the whole answer is known: not where a contract judges the whole."""
        return "contract" not in self.manifest.stages

    def check_input(self, fields: dict[str, Any]) -> None:
        """Raises InputInvalid that names every field that is wrong and how."""
        if problems := _problems(self._input, self.input_schema, fields):
            raise InputInvalid(
                f"The input of {self.path} is not as its contract says: " + "; ".join(said for _, said in problems[:5]) + ".",
                hint=f"The contract is at GET /api/v1/capabilities under {self.path!r}.",
                param=problems[0][0] or None,
            )

    def check_output(self, fields: Any) -> None:
        """Raises OutputInvalid that names what is wrong, without the answer's text."""
        if where := self.breaks(fields):
            raise OutputInvalid(
                f"The model's answer broke the output contract of {self.path} at {', '.join(where[:5])}.",
                hint="Nothing was passed on. Try again, or look at the flight for what happened.",
            )

    def breaks(self, fields: Any) -> list[str]:
        """Where the fields break the output contract, and by which rule."""
        return sorted({f"{_where(error)} ({_keyword(error)})" for error in self._output.iter_errors(fields)})


def load_all(folders: list[str], budgets: BudgetSettings | None = None) -> dict[str, Capability]:
    """All capabilities under `folders`, by path. `budgets`: what holds where they say nothing.

    Raises SettingsError that names the file that is wrong.
    """
    found: dict[str, Capability] = {}
    for folder in folders:
        root = Path(folder).expanduser()
        if not root.is_dir():
            raise SettingsError(f"There is no folder {root} (capabilities.folders).", hint="Correct the path, or create the folder.")
        for manifest in sorted(root.glob("*/*/capability.toml")):
            capability = load(manifest.parent, budgets)
            if capability.path in found:
                raise SettingsError(f"The capability {capability.path} is in two folders; the second is {manifest.parent}.", hint="Remove one.")
            found[capability.path] = capability
    return found


def load(folder: Path, budgets: BudgetSettings | None = None) -> Capability:
    """One capability; see load_all. Raises SettingsError that names the file and what is wrong in it."""
    path = f"{folder.parent.name}/{folder.name}"
    manifest = _manifest(folder / "capability.toml")
    prompt = folder / "prompts" / manifest.prompt / "template.jinja"
    source = _read(prompt)
    try:
        # Sandboxed: a prompt is data of its author, not a program with our rights. Undefined names are errors, never empty text.
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, autoescape=False, trim_blocks=True)
        template = environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise SettingsError(f"{prompt}:{error.lineno}: {error.message}", hint="Correct the template.") from None
    if missing := {"system", "user"} - set(template.blocks):
        raise SettingsError(f"{prompt} has no block {', '.join(sorted(missing))}.", hint="A template has the blocks `system` and `user`.")
    input_schema, input_validator = _schema(folder / "input.schema.json")
    output_schema, output_validator = _schema(folder / "output.schema.json")
    digest = hashlib.sha256()
    files = [folder / "capability.toml", folder / "input.schema.json", folder / "output.schema.json", prompt]
    terms: list[str] = []
    if manifest.guard.terms_file:
        files.append(folder / manifest.guard.terms_file)
        terms = read_terms(files[-1])
    faq: Faq | None = None
    if manifest.faq.file:
        files.append(folder / manifest.faq.file)
        faq = read_faq(files[-1])
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    capability = Capability(
        path, manifest, _in_force(manifest.budgets, budgets or BudgetSettings.model_validate({})), input_schema, output_schema,
        hashlib.sha256(source.encode()).hexdigest(), digest.hexdigest(), template, terms, faq, input_validator, output_validator,
    )
    check_ladder(folder / "capability.toml", capability)
    return capability


def _in_force(own: Budgets, common: BudgetSettings) -> Budgets:
    return own.model_copy(
        update={"retrieve_s": own.retrieve_s or common.retrieve_s, "first_token_s": own.first_token_s or common.first_token_s}
    )


def _manifest(file: Path) -> Manifest:
    try:
        manifest = Manifest.model_validate(tomllib.loads(_read(file)))
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{file} is not TOML: {error}.", hint="Correct the line that it names.") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            known_names = _known_names(first["loc"])
            hint = nearest(str(first["loc"][-1]), known_names) if known_names else _ALL_NAMES
            raise SettingsError(f"{file}: there is no {where!r}.", hint=hint) from None
        raise SettingsError(f"{file}: {where}: {first['msg']}.", hint=_ALL_NAMES) from None
    known = names("tidegate.pipeline.stages")
    for stage in [*manifest.stages, *(trigger.stage for trigger in manifest.triggers)]:
        if stage not in known:
            raise SettingsError(f"{file}: there is no stage {stage!r}.", hint=nearest(stage, known))
    if (rerank := manifest.retrieve.rerank) and rerank not in known_rerankers():
        raise SettingsError(f"{file}: there is no reranker {rerank!r}.", hint=nearest(rerank, known_rerankers()))
    for name, path, hint in (
        ("guard.terms_file", Path(manifest.guard.terms_file), "; terms for all answers belong into [guard] of tidegate.toml"),
        ("faq.file", Path(manifest.faq.file), ""),
    ):
        if path.is_absolute() or ".." in path.parts:
            raise SettingsError(
                f"{file}: {name} is {str(path)!r}, which is not in the capability's folder.",
                hint=f"Put the file into the capability's folder and name it from there{hint}.",
            )
    if manifest.length.policy != "off" and "fit" not in manifest.stages:
        raise SettingsError(f"{file}: [length] has a policy, but there is no stage `fit`.", hint="Put `fit` before `generate`.")
    seen: dict[str | tuple[int, ...], int] = {}
    for number, trigger in enumerate(manifest.triggers, 1):
        if bool(trigger.text) == bool(trigger.token_ids):
            raise SettingsError(f"{file}: trigger {number} has not exactly one of text and token_ids.", hint="Give it one of them.")
        if "generate" not in manifest.stages:
            raise SettingsError(f"{file}: it has triggers, but no stage `generate`.", hint="Triggers watch what the model says.")
        _check_trigger(file, number, trigger, seen)
    return manifest


def _check_trigger(file: Path, number: int, trigger: TriggerSettings, seen: dict[str | tuple[int, ...], int]) -> None:
    """`seen`: the triggers before it, by their sequence."""
    if wrong := [one for one in trigger.token_ids if not 0 <= one <= _MAX_TOKEN_ID]:
        raise SettingsError(
            f"{file}: trigger {number}: {wrong[0]} in token_ids is no token id.", hint=f"Token ids lie between 0 and {_MAX_TOKEN_ID}."
        )
    sequence = trigger.text or tuple(trigger.token_ids)
    if (first := seen.setdefault(sequence, number)) != number:
        raise SettingsError(f"{file}: triggers {first} and {number} wait for the same sequence.", hint="Remove one of them.")
    if trigger.text and trigger.text in trigger.insert:
        raise SettingsError(
            f"{file}: trigger {number}: its insert holds its own text, with which it would start again.", hint="Insert another text."
        )


def _schema(file: Path) -> tuple[dict[str, Any], jsonschema_rs.Validator]:
    try:
        schema: dict[str, Any] = json.loads(_read(file))
        # The mask keeps the caller's values out of messages: business fields are personal data, and messages end up in logs.
        return schema, jsonschema_rs.validator_for(schema, mask="the value")
    except (ValueError, jsonschema_rs.ValidationError) as error:
        raise SettingsError(f"{file} is not a JSON Schema: {error}", hint="Correct the schema.") from None


def _known_names(place: Sequence[str | int]) -> list[str]:
    """What the section at `place`, whose last step is a name that is not known, may hold."""
    section: type[Section] | None = Manifest
    for step in place[:-1]:
        if isinstance(step, str) and section is not None:
            section, _ = inner(section.model_fields[step])
    return list(section.model_fields) if section is not None else []


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file} cannot be read: {error}.", hint="Every capability has this file, as UTF-8 text.") from None


def _where(error: jsonschema_rs.ValidationError) -> str:
    return ".".join(str(step) for step in error.instance_path) or "(the whole)"


def _keyword(error: jsonschema_rs.ValidationError) -> str:
    return str(error.schema_path[-1]) if error.schema_path else "schema"


def _problems(validator: jsonschema_rs.Validator, schema: dict[str, Any], fields: Any) -> list[tuple[str, str]]:
    """For each broken rule the field ("" where it is the whole body) and a sentence's piece that begins with it."""
    found: list[tuple[str, str]] = []
    for error in validator.iter_errors(fields):
        path, because = [str(step) for step in error.instance_path], _because(schema, error.schema_path)
        kind = error.kind
        if isinstance(kind, jsonschema_rs.ValidationErrorKind.Required):
            broken = [([*path, str(kind.property)], "is missing")]
        elif isinstance(kind, jsonschema_rs.ValidationErrorKind.AdditionalProperties):
            broken = [([*path, name[:64]], "is not known") for name in kind.unexpected]
        else:
            broken = [(path, error.message[:200])]
        for steps, what in broken:
            field = ".".join(steps)
            found.append((field, f"{field}: {what}{because}" if field else f"{what}{because}"))
    return found


def _because(schema: Any, steps: list[str | int]) -> str:
    """The author's own words for the broken rule: the nearest `description` on the way to it, of a cross-field rule or a field."""
    words = ""
    for step in steps:
        try:
            schema = schema[step]
        except (KeyError, IndexError, TypeError):
            break
        if isinstance(schema, dict):
            words = schema.get("description", words)
    return f" ({words.rstrip('.')})" if words else ""
