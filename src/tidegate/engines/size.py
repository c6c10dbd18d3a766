"""How much a call is: tokens of its prompt and of the answer that is expected. Estimates, to choose by; what is booked is what the engine counted.

The memory that a request takes is tokens times the KV cache's bytes per token (2 * layers * KV heads * head size * bytes of a number), which is the
same for all requests of one instance: so whatever an instance could or could not hold is kept in tokens.
"""

from __future__ import annotations

from typing import Any

from tidegate.core.ask import EngineCall
from tidegate.engines.openai_http import prompt_bytes

#: Tokens of an answer before any was seen.
FIRST_ANSWER = 256.0
#: Weight of the newest answer in the running mean.
NEWEST = 0.05


def prompt_tokens(call: EngineCall) -> int:
    """A token per four bytes, about right for English and Chinese alike; of the caller's own bytes, which hold the JSON too, a little more."""
    if call.raw is not None:
        return len(call.raw) // 4 + 1
    size = 0
    for message in call.body.get("messages") or ():
        text = message.get("content")
        if text.__class__ is not str:
            return prompt_bytes(call) // 4 + 1
        size += len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
    return (size or prompt_bytes(call)) // 4 + 1


def answer_tokens(body: dict[str, Any], mean: float) -> int:
    """Tokens of the answer: what answers were lately, but no more than the caller allows."""
    bound = body.get("max_completion_tokens") or body.get("max_tokens")
    return int(mean if bound.__class__ is not int or not 0 < bound < mean else bound)
