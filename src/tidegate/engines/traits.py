"""What an engine can do beyond answering. An adapter names what its engine cannot, each with the reason; the contract suite holds it to both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

#: Each thing that some engine cannot do, and what it means that one can:
#:
#: - continue: `continue_from` goes on from exactly a prefix. Where it cannot: CannotContinue.
#: - forbid: the token that comes first after the prefix can be kept from being a given one. Where it cannot: CannotContinue.
#: - token_ids: a stream's chunks carry the ids of exactly their tokens. Where it cannot: None, and a continuation is `retokenised`.
#: - control_text: text that a user typed and that reads as a control token reaches the model as that very text. Where it cannot: the text is
#:   changed so that it is none (`special_tokens_defused`), or it is the engine's own business, as the reason says.
#: - cancel_whole: a non-streaming call ends when its connection does. Where it cannot: the adapter streams from the engine all the same.
#: - cancel_prefill: a prompt that is being read can be given up. Where it cannot: figures count it until the engine is done with it.
#: - usage: the engine counts the tokens of prompt and answer. Where it cannot: an estimate, marked as one.
#: - running: figures say how many answers the engine is working on.
#: - stop: stop strings end an answer.
#: - context: a prompt that does not fit is refused with the reason, not cut.
Ability = Literal[
    "continue", "forbid", "token_ids", "control_text", "cancel_whole", "cancel_prefill", "usage", "running", "stop", "context",
]

ABILITIES: tuple[Ability, ...] = get_args(Ability)

#: What an engine cannot do, and why, in a sentence each.
Cannot = Mapping[Ability, str]
