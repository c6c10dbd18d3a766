"""Why a call failed, in a word: what the breaker counts, what is remembered of the instance, and what a new plan begins with."""

from __future__ import annotations

from typing import Literal

from tidegate.core.errors import (
    CannotContinue,
    ContextTooLong,
    EngineCut,
    EngineDown,
    EngineEmpty,
    EngineError,
    EngineNotAdmitted,
    EngineRefused,
    EngineStalled,
)

#: - down: it could not be reached, nothing was sent; died: it closed the connection without an answer
#: - cut, stalled: it broke off, it went silent
#: - error: it answered with 5xx, or with what is no answer
#: - queue: it has too much to do (429, 503)
#: - memory, length: the request does not fit: its memory, its context
#: - none: its own word on the request, or the gateway had no room for a connection; it says nothing of the instance
Cause = Literal["down", "died", "cut", "stalled", "error", "queue", "memory", "length", "none"]

#: Causes that speak against the instance. Busy is not ill, and what does not fit is a matter of the request.
ILL: frozenset[Cause] = frozenset({"down", "died", "cut", "stalled", "error"})

#: How engines say that memory is short: CUDA and torch, vLLM, llama.cpp (whose KV cache is full), TGI, TensorRT-LLM.
_MEMORY = (
    "out of memory", "OutOfMemory", "failed to find free space in the KV cache", "Context size has been exceeded", "No available memory",
    "failed to allocate", "not enough memory", "insufficient memory", "cudaMalloc", "No free KV cache blocks", "Model is overloaded: no free blocks",
)  # fmt: skip


def cause_of(error: BaseException | None) -> Cause:
    """The cause of a call's end; "none" where it ended well, or through its caller."""
    if isinstance(error, ContextTooLong):
        return "length"
    if not isinstance(error, EngineError) or isinstance(error, CannotContinue | EngineEmpty | EngineNotAdmitted):
        return "none"
    if isinstance(error, EngineDown) and error.ours:
        return "none"
    if any(words in error.message for words in _MEMORY):
        return "memory"
    if isinstance(error, EngineRefused):
        if error.engine_status in (429, 503):
            return "queue"
        return "error" if error.engine_status >= 500 else "none"
    if isinstance(error, EngineDown):
        return "died" if error.reached else "down"
    if isinstance(error, EngineCut):
        return "cut"
    if isinstance(error, EngineStalled):
        return "stalled"
    return "none" if 400 <= error.engine_status < 500 else "error"
