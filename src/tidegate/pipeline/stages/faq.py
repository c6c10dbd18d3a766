"""Answers from the capability's FAQ: an entry whose keywords are all in the question, else nothing."""

from __future__ import annotations

from tidegate.core.ask import Ask
from tidegate.core.errors import NotFound, SettingsError
from tidegate.core.ports import Stage
from tidegate.pipeline.capability import Capability
from tidegate.pipeline.faq import Faq
from tidegate.pipeline.parts import Parts


class FaqStage:
    """Question in, the entry's business fields out. Its entries were held against the output contract when the capability was loaded."""

    name = "faq"

    def __init__(self, faq: Faq, field: str) -> None:
        """`field`: the input field that holds the question."""
        self._faq = faq
        self._field = field

    async def __call__(self, ask: Ask) -> None:
        flight = ask.flight
        number = self._faq.find(str(ask.input.get(self._field, "")))
        flight.lap("faq")
        flight.decide("faq", entry=None if number is None else number + 1)
        if number is None:
            raise NotFound("No entry of the FAQ fits this question.", hint="Ask in other words.")
        ask.answer = dict(self._faq.entries[number].output)
        flight.end = "stop"


def build(capability: Capability, parts: Parts) -> Stage:
    """Raises SettingsError where the capability has no FAQ."""
    if capability.faq is None:
        raise SettingsError(f"The capability {capability.path} has no FAQ.", hint="Name its file: faq.file in capability.toml.")
    return FaqStage(capability.faq, capability.manifest.faq.question or capability.manifest.retrieve.question)
