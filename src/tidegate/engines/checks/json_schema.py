"""An answer that was asked for in a JSON schema is valid against it."""

from __future__ import annotations

import jsonschema_rs
import msgspec

from tidegate.engines.probe import Check, Outcome, Probe, failed, inapplicable, passed, unproven

_SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["colour", "count", "sure"],
    "properties": {
        "colour": {"type": "string", "enum": ["red", "green", "blue"]}, "count": {"type": "integer", "enum": [3, 4, 5]}, "sure": {"type": "boolean"},
    },
}  # fmt: skip
_TOKENS = 64


async def _run(probe: Probe) -> Outcome:
    if not probe.http:
        return inapplicable("no response_format in this protocol")
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": _SCHEMA}}
    run = await probe.chat("Tell a story about the sea.", max_tokens=_TOKENS, response_format=wanted)
    if run.status != 200:
        return inapplicable(f"refused with {run.why}")
    if run.finish == "length":
        return unproven(f"the answer was not over after {_TOKENS} tokens")
    try:
        answer = msgspec.json.decode(run.text)
    except (msgspec.DecodeError, UnicodeError):
        return failed(f"the answer of {len(run.text)} characters is no JSON: response_format is ignored")
    wrong = next(iter(jsonschema_rs.validator_for(_SCHEMA).iter_errors(answer)), None)
    return failed(f"the answer breaks the schema: {wrong.message[:120]}") if wrong else passed(f"valid, {len(run.text)} characters")


CHECK = Check(150, "should", "Answers in a JSON schema are valid.", _run, tokens=32)
