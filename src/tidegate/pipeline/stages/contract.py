"""The output contract: what leaves is what the schema says, or nothing leaves."""

from __future__ import annotations

import msgspec

from tidegate.core.ask import Ask
from tidegate.core.errors import OutputInvalid
from tidegate.core.nesting import MAX_DEPTH, too_deep
from tidegate.core.ports import Stage
from tidegate.pipeline.capability import Capability
from tidegate.pipeline.parts import Parts


class ContractStage:
    """Text in, checked business fields out. Engines accept schema keywords that they then ignore, so this always checks."""

    name = "contract"

    def __init__(self, capability: Capability) -> None:
        self._capability = capability

    async def __call__(self, ask: Ask) -> None:
        flight = ask.flight
        try:
            fields = msgspec.json.decode("".join(ask.text))
            if too_deep(fields):
                raise RecursionError(f"nested more than {MAX_DEPTH} levels deep")
        except (msgspec.DecodeError, RecursionError) as error:
            flight.decide("contract", kept=False, why="not json")
            raise OutputInvalid(
                f"The model's answer to {self._capability.path} is not JSON ({'it was cut by max_tokens' if flight.end == 'length' else error}).",
                hint="Nothing was passed on. Try again, or raise generate.max_tokens in capability.toml.",
            ) from None
        try:
            self._capability.check_output(fields)
        except OutputInvalid:
            flight.decide("contract", kept=False, why="schema")
            raise
        flight.decide("contract", kept=True)
        ask.answer = fields
        flight.lap("contract")


def build(capability: Capability, parts: Parts) -> Stage:
    return ContractStage(capability)
