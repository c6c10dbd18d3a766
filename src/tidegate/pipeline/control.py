"""What watches an answer while it is told: terms that must not be said, and triggers that hand over to a stage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from tidegate.core.ask import Ask
from tidegate.guard.settings import GuardSettings
from tidegate.guard.terms import TermList, Terms
from tidegate.guard.terms_file import read_terms

OnTerm = Literal["step_back", "stop"]


class Insertion(Protocol):
    """A stage that a trigger may start: what it gives is put into the answer."""

    async def give(self, ask: Ask) -> str: ...


@dataclass(frozen=True, slots=True)
class Trigger:
    """A sequence that stops the generation and starts a stage. Given as `text`, compared as it is, or as `token_ids`.

    `keep`: the trigger's own text leaves too. `insert`: what is put into the answer, with {given} for what the stage gives.
    """

    stage: Insertion
    name: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    keep: bool = False
    goes_on: bool = True
    insert: str = "{given}"


@dataclass(frozen=True, slots=True)
class Ban:
    """What must not be said in any answer. `terms` is `lists`, compiled."""

    lists: tuple[TermList, ...] = ()
    terms: Terms | None = None
    on_term: OnTerm = "step_back"
    max_step_backs: int = 3
    parted_letters: bool = True

    @classmethod
    def of(cls, settings: GuardSettings) -> Ban:
        """Raises SettingsError for a terms file that cannot be read."""
        if not settings.terms_file:
            return cls(on_term=settings.on_term, max_step_backs=settings.max_step_backs, parted_letters=settings.parted_letters)
        lists = (TermList(read_terms(Path(settings.terms_file).expanduser()), settings.whole_words),)
        return cls(lists, Terms(lists, parted=settings.parted_letters), settings.on_term, settings.max_step_backs, settings.parted_letters)


class Control:
    """The terms and triggers of a route, compiled once."""

    __slots__ = ("by_ids", "by_text", "max_step_backs", "on_term", "starts", "terms", "triggers")

    def __init__(
        self, terms: Terms | None = None, *, on_term: OnTerm = "step_back", max_step_backs: int = 3, triggers: tuple[Trigger, ...] = ()
    ) -> None:
        self.terms = terms if terms is not None and terms.count else None
        self.on_term: OnTerm = on_term
        self.max_step_backs = max_step_backs
        self.triggers = triggers
        self.by_text = [trigger for trigger in triggers if trigger.text]
        self.by_ids = [trigger for trigger in triggers if trigger.token_ids]
        self.starts = Terms([TermList([trigger.text for trigger in self.by_text])], exact=True) if self.by_text else None

    def __bool__(self) -> bool:
        return self.terms is not None or bool(self.triggers)
