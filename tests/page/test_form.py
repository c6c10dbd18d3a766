"""Forms from schemas."""

from __future__ import annotations

import json

from stand_in import SUPPORT, UNDERWRITING

from tidegate.api.page import form


def test_every_property_gets_an_input_of_its_kind() -> None:
    """Required ones first; names are paths in the body."""
    kinds = [(one.name, one.kind, one.required) for one in form.fields(UNDERWRITING)]
    assert kinds == [
        ("age", "integer", True), ("smoker", "yes_no", True), ("sum_insured", "number", True), ("occupation", "text", False),
        ("medical_history", "lines", False), ("address", "group", False),
    ]
    inside = form.fields(UNDERWRITING)[-1].fields
    assert [(one.name, one.kind) for one in inside] == [("address.country", "choice"), ("address.city", "text")]


def test_parts_of_what_may_be_left_out_are_not_demanded() -> None:
    """`country` is required inside an optional address: the browser must let an empty address pass."""
    assert not any(one.required for one in form.fields(UNDERWRITING)[-1].fields)


def test_long_text_has_a_box_and_bounds_are_kept() -> None:
    """`maxLength` above a line is a text area; minimum and maximum reach the input."""
    question, product = form.fields(SUPPORT)
    assert (question.kind, question.min_length, question.max_length) == ("long", 3, 2000)
    assert (product.kind, product.choices) == ("choice", ["home", "motor", "travel", "health"])
    age = form.fields(UNDERWRITING)[0]
    assert (age.minimum, age.maximum) == (18, 99)


def test_what_no_input_can_hold_is_asked_for_as_json() -> None:
    """Lists of objects, unions, and schemas without a type."""
    odd = {"properties": {"a": {"type": "array", "items": {"type": "object"}}, "b": {"type": ["string", "integer"]}, "c": True, "d": {}}}
    assert [one.kind for one in form.fields(odd)] == ["json"] * 4
    nullable = {"properties": {"a": {"type": ["string", "null"]}, "b": {"enum": ["x", None]}}}
    assert [one.kind for one in form.fields(nullable)] == ["text", "choice"]


def test_examples_are_whole_bodies_with_a_label() -> None:
    """One text is its own label, in its own language; a filled form says its first facts."""
    assert [(one.label, one.lang) for one in form.examples(SUPPORT)][-1] == ("车险理赔需要准备哪些材料?", "zh")
    more = SUPPORT | {"examples": [{"product": "home", "question": "How much?"}]}
    assert [one.label for one in form.examples(more)] == ["How much?"]
    first = form.examples(UNDERWRITING)[0]
    assert first.label == "age 34, smoker no"
    assert json.loads(first.body) == UNDERWRITING["examples"][0]


def test_examples_of_the_one_question_serve_too() -> None:
    """Where the schema has no whole examples."""
    schema = {"required": ["q"], "properties": {"q": {"type": "string", "examples": ["One?", "Two?"]}}}
    assert [json.loads(one.body) for one in form.examples(schema)] == [{"q": "One?"}, {"q": "Two?"}]
