"""A form from a capability's input schema: business fields as people fill them in.

Strings, numbers, booleans, enums, lists of strings and nested objects have inputs of their own; anything else is a box for JSON. The
browser checks what HTML can say; the capability's contract judges the whole, cross-field rules included.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

_LONG_TEXT = 120


@dataclass(frozen=True, slots=True)
class Field:
    """One input. `kind`: text, long, number, integer, choice, yes_no, lines, json or group; `name` is the dotted path in the body.

    `may_be_none`: a list that may be empty, which is not the same as a list that is not given.
    """

    name: str
    label: str
    kind: str
    help: str = ""
    required: bool = False
    may_be_none: bool = False
    choices: list[str] = field(default_factory=list)
    minimum: float | None = None
    maximum: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    placeholder: str = ""
    fields: list[Field] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Example:
    """A filled-in form: a short label, and the body as JSON."""

    label: str
    body: str
    lang: str


def fields(schema: dict[str, Any], prefix: str = "", *, needed: bool = True) -> list[Field]:
    """The inputs of an object schema: required ones first, else in the author's order. Not `needed`: an object that may be left out, so
    the browser cannot demand its parts."""
    required = set(schema.get("required", ())) if needed else set()
    found = [_field(name, prefix, part, name in required) for name, part in _properties(schema).items()]
    return sorted(found, key=lambda one: not one.required)


def examples(schema: dict[str, Any]) -> list[Example]:
    """The schema's `examples` (whole bodies); where it has none, those of its one required text."""
    properties = _properties(schema)
    texts = [name for name in schema.get("required", ()) if properties.get(name, {}).get("type") == "string" and not _choices(properties[name])]
    text = texts[0] if len(texts) == 1 else ""
    bodies = [body for body in schema.get("examples", ()) if isinstance(body, dict)]
    if not bodies and text:
        bodies = [{text: one} for one in properties[text].get("examples", ())]
    return [_example(n, body, text) for n, body in enumerate(bodies, 1)]


def _properties(schema: dict[str, Any]) -> dict[str, Any]:
    return {name: part if isinstance(part, dict) else {} for name, part in schema.get("properties", {}).items()}


def _field(name: str, prefix: str, part: dict[str, Any], required: bool) -> Field:
    path = f"{prefix}{name}"
    kind = _kind(part)
    label = str(part.get("title") or name.replace("_", " ").strip().capitalize())
    shown = part.get("examples") or []
    return Field(
        path, label, kind, str(part.get("description", "")), required,
        may_be_none=kind == "lines" and not part.get("minItems"), choices=[str(choice) for choice in _choices(part)],
        minimum=part.get("minimum", part.get("exclusiveMinimum")), maximum=part.get("maximum", part.get("exclusiveMaximum")),
        min_length=part.get("minLength"), max_length=part.get("maxLength"),
        placeholder=str(shown[0]) if shown and kind in ("text", "number", "integer") else "",
        fields=fields(part, f"{path}.", needed=required) if kind == "group" else [],
    )


def _kind(part: dict[str, Any]) -> str:
    types = part.get("type")
    kinds = [kind for kind in (types if isinstance(types, list) else [types]) if kind != "null"]
    kind = kinds[0] if len(kinds) == 1 else None
    if _choices(part) and all(isinstance(choice, str) for choice in _choices(part)):
        return "choice"
    if kind == "string":
        return "long" if part.get("maxLength", 0) > _LONG_TEXT or part.get("x-long") else "text"
    if kind == "array" and part.get("items", {}).get("type") == "string":
        return "lines"
    if kind == "object" and part.get("properties"):
        return "group"
    return {"integer": "integer", "number": "number", "boolean": "yes_no"}.get(kind or "", "json")


def _choices(part: dict[str, Any]) -> list[Any]:
    return [choice for choice in part.get("enum", ()) if choice is not None]


def _facts(body: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in body.items() if isinstance(value, str | int | float)]


def _said(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _example(n: int, body: dict[str, Any], text: str) -> Example:
    # A question is its own label; of a filled-in form, a button has room for the first facts.
    first = ", ".join(f"{name.replace('_', ' ')} {_said(value)}" for name, value in _facts(body)[:2])
    label = str(body.get(text) or first or f"Example {n}")
    chinese = any("\u3400" <= sign <= "\u9fff" for sign in label)
    return Example(label, json.dumps(body, ensure_ascii=False), "zh" if chinese else "en")
