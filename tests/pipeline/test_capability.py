"""Capability folders: what loads, what is refused and how it is said, and what the contracts let pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tidegate.core.errors import InputInvalid, OutputInvalid, SettingsError
from tidegate.pipeline.capability import load, load_all

INPUT: dict[str, Any] = {
    "type": "object",
    "required": ["age"],
    "properties": {"age": {"type": "integer", "minimum": 0, "description": "Age in years."}, "history": {"type": "array"}},
    "additionalProperties": False,
    "if": {"properties": {"age": {"exclusiveMinimum": 65}}},
    "then": {"required": ["history"], "description": "Applicants over 65 give their medical history."},
}
OUTPUT = {"type": "object", "required": ["decision"], "properties": {"decision": {"enum": ["accept", "refer"]}}, "additionalProperties": False}
MANIFEST = 'stages = ["prompt", "generate", "contract"]\n'
TEMPLATE = "{% block system %}Decide.{% endblock %}{% block user %}{{ input.age }}{% endblock %}"


def write(root: Path, manifest: str = MANIFEST, template: str = TEMPLATE, input_schema: object = INPUT) -> Path:
    folder = root / "group" / "name"
    (folder / "prompts" / "v1").mkdir(parents=True)
    (folder / "capability.toml").write_text(manifest)
    (folder / "input.schema.json").write_text(json.dumps(input_schema))
    (folder / "output.schema.json").write_text(json.dumps(OUTPUT))
    (folder / "prompts" / "v1" / "template.jinja").write_text(template)
    return folder


def test_a_folder_is_served_under_its_path(tmp_path: Path) -> None:
    """GROUP/NAME is the capability's path."""
    write(tmp_path)
    assert list(load_all([str(tmp_path)])) == ["group/name"]


def test_the_hash_covers_every_file_that_shapes_answers(tmp_path: Path) -> None:
    """A changed prompt is another version."""
    folder = write(tmp_path)
    before = load(folder).sha256
    (folder / "prompts" / "v1" / "template.jinja").write_text(TEMPLATE + " ")
    assert load(folder).sha256 != before


@pytest.mark.parametrize(
    ("manifest", "says"),
    [
        ('stages = ["promt"]', "did you mean 'prompt'"),
        ('stages = ["prompt"]\ntemprature = 1', "temprature"),
        ("stages = [", "is not TOML"),
        ('stages = ["prompt"]\nprompt = "v9"', "cannot be read"),
        ('stages = ["prompt"]\n[generate]\nmax_tokens = 0', "generate.max_tokens"),
    ],
)
def test_a_broken_manifest_is_refused_by_name(tmp_path: Path, manifest: str, says: str) -> None:
    """The error names the file and what is wrong in it."""
    folder = write(tmp_path, manifest)
    with pytest.raises(SettingsError) as refused:
        load(folder)
    assert says.casefold() in f"{refused.value.message} {refused.value.hint}".casefold()
    assert str(folder) in refused.value.message


@pytest.mark.parametrize(
    ("more", "says", "hint"),
    [
        ("[retrieve]\nrernak = 'off'\n", "there is no 'retrieve.rernak'", "Did you mean 'rerank'?"),
        ("modle = 'x'\n", "there is no 'modle'", "Did you mean 'model'?"),
        ("[[ladder]]\nrung = 'faq'\nnoet = 'x'\n", "there is no 'ladder.0.noet'", "docs/capabilities.md"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(tmp_path: Path, more: str, says: str, hint: str) -> None:
    """Wherever in the file it stands."""
    with pytest.raises(SettingsError, match=says) as refused:
        load(write(tmp_path, f'stages = ["prompt", "generate"]\n{more}'))
    assert hint in str(refused.value.hint)


@pytest.mark.parametrize(
    ("template", "says"),
    [("{% block system %}{% endblock %}", "no block user"), ("{% block system %}{{ }}{% endblock %}", "template.jinja:1")],
)
def test_a_broken_template_is_refused_at_start(tmp_path: Path, template: str, says: str) -> None:
    """A template error is found when the folder is loaded, not when a customer asks."""
    with pytest.raises(SettingsError, match=says):
        load(write(tmp_path, template=template))


def test_a_schema_that_is_none_is_refused(tmp_path: Path) -> None:
    """A file that is no JSON Schema is named."""
    with pytest.raises(SettingsError, match="not a JSON Schema"):
        load(write(tmp_path, input_schema={"type": "nonsense"}))


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    """A path that is not there is said."""
    with pytest.raises(SettingsError, match="There is no folder"):
        load_all([str(tmp_path / "nowhere")])


def test_the_same_path_in_two_folders_is_refused(tmp_path: Path) -> None:
    """Which of the two would answer must never be a matter of order."""
    write(tmp_path / "a")
    write(tmp_path / "b")
    with pytest.raises(SettingsError, match="two folders"):
        load_all([str(tmp_path / "a"), str(tmp_path / "b")])


def test_a_cross_field_rule_is_said_in_its_authors_words(tmp_path: Path) -> None:
    """A broken rule is explained by the description that its author gave it."""
    capability = load(write(tmp_path))
    capability.check_input({"age": 65})
    capability.check_input({"age": 66, "history": []})
    with pytest.raises(InputInvalid, match="Applicants over 65 give their medical history"):
        capability.check_input({"age": 66})


def test_the_callers_values_stay_out_of_the_message(tmp_path: Path) -> None:
    """Business fields are personal data: they are not repeated in errors."""
    with pytest.raises(InputInvalid) as refused:
        load(write(tmp_path)).check_input({"age": "Ms Secret, born 1950"})
    assert "Secret" not in refused.value.message
    assert refused.value.param == "age"


def test_an_output_that_breaks_the_contract_is_named_without_its_text(tmp_path: Path) -> None:
    """The field and the rule are named, never the model's words."""
    with pytest.raises(OutputInvalid) as refused:
        load(write(tmp_path)).check_output({"decision": "maybe not"})
    assert "decision (enum)" in refused.value.message
    assert "maybe" not in refused.value.message


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ('[[triggers]]\nstage = "create_ticket"', "exactly one of text and token_ids"),
        ('[[triggers]]\ntext = "x"\ntoken_ids = [1]', "exactly one of text and token_ids"),
        ('[[triggers]]\ntext = "x"\nstage = "create_tiket"', "did you mean 'create_ticket'"),
        ('[[triggers]]\ntoken_ids = [1, -1]', "-1 in token_ids is no token id"),
        ('[[triggers]]\ntoken_ids = [2147483648]', "between 0 and 2147483647"),
        ('[[triggers]]\ntext = "x"\n[[triggers]]\ntext = "x"\nthen = "stop"', "triggers 1 and 2 wait for the same"),
        ('[[triggers]]\ntoken_ids = [1, 2]\n[[triggers]]\ntoken_ids = [1, 2]', "triggers 1 and 2 wait for the same"),
        ('[[triggers]]\ntext = "[x]"\ninsert = "see [x]: {given}"', "insert holds its own text"),
        ('[guard]\nterms_file = "/etc/terms.txt"', "'/etc/terms.txt', which is not in the capability's folder"),
        ('[guard]\nterms_file = "lists/../../terms.txt"', "which is not in the capability's folder"),
        ('[guard]\nterms_file = "nowhere.txt"', "nowhere.txt cannot be read"),
        ('[guard]\non_term = "shout"', "guard.on_term"),
    ],
)
def test_a_broken_guard_or_trigger_is_refused_by_name(tmp_path: Path, more: str, says: str) -> None:
    """At the start, with its file."""
    with pytest.raises(SettingsError) as refused:
        load(write(tmp_path, MANIFEST + more))
    assert says.casefold() in f"{refused.value.message} {refused.value.hint}".casefold()
    assert str(tmp_path) in refused.value.message


def test_token_ids_reach_to_the_last_that_there_can_be(tmp_path: Path) -> None:
    """0 and 2^31-1 are token ids."""
    assert load(write(tmp_path, MANIFEST + "[[triggers]]\ntoken_ids = [0, 2147483647]")).manifest.triggers[0].token_ids == [0, 2**31 - 1]


def test_the_hash_covers_the_terms(tmp_path: Path) -> None:
    """Another list is another version."""
    folder = write(tmp_path, MANIFEST + '[guard]\nterms_file = "terms.txt"\n')
    (folder / "terms.txt").write_text("one\n")
    before = load(folder)
    (folder / "terms.txt").write_text("two\n")
    assert before.terms == ["one"]
    assert load(folder).sha256 != before.sha256
