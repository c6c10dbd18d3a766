"""What a gRPC status of Triton means to the caller."""

from __future__ import annotations

from tidegate.core.errors import ContextTooLong, EngineCut, EngineDown, EngineError, EngineRefused, EngineStalled, TidegateError
from tidegate.engines.refusal import is_context

#: gRPC statuses by which the engine refuses -> the HTTP status that says the same.
_REFUSED = {
    "INVALID_ARGUMENT": 400, "OUT_OF_RANGE": 400, "FAILED_PRECONDITION": 400, "NOT_FOUND": 404, "ALREADY_EXISTS": 409, "ABORTED": 409,
    "RESOURCE_EXHAUSTED": 429, "UNIMPLEMENTED": 501, "INTERNAL": 502, "UNKNOWN": 502, "DATA_LOSS": 502,
}  # fmt: skip
_HINTS = {
    "NOT_FOUND": "Does Triton serve this model under this name, and is it ready? See models of [engines.NAME].",
    "RESOURCE_EXHAUSTED": "The engine is at its limit. Come back later, or ask for less.",
    "UNIMPLEMENTED": "Is url of this engine the address of Triton's gRPC port (8001)?",
}
_MAX_MESSAGE = 2000
#: What gRPC itself says where a connection broke in the middle of a call.
_BROKEN = ("RST_STREAM", "Socket closed", "Connection reset", "GOAWAY", "Stream removed", "Broken pipe", "EOF")


def status_error(label: str, status: str, details: str, *, began: bool) -> TidegateError:
    """The error for a call that ended with `status` (e.g. "UNAVAILABLE"). `began`: something of the answer had come."""
    details = _reason(details)
    broken = any(word in details for word in _BROKEN)
    if status == "DEADLINE_EXCEEDED":
        return EngineStalled(f"{label} did not end its answer in time (total_s): {details}", hint="Is the engine overloaded or hung?")
    if status == "OK" or (began and (status == "UNAVAILABLE" or broken)):
        return EngineCut(f"{label} ended the stream in the middle of its answer ({status}: {details}).", hint="Its log may say why.")
    if "protocol is restricted" in details:
        return EngineError(f"{label} keeps this to itself: {details}", hint="It was started with --grpc-restricted-protocol.")
    if status == "UNAVAILABLE" and "queue" in details.lower():
        return EngineRefused(
            f"{label} refused the request: {details}", engine_status=429, engine_code="queue_full", hint=_HINTS["RESOURCE_EXHAUSTED"]
        )
    if status == "UNAVAILABLE" or broken:
        return EngineDown(f"{label} cannot be reached or closed the connection: {details}", hint="Is Triton running, and url its gRPC port (8001)?")
    if status == "CANCELLED":
        return EngineCut(f"{label} gave the answer up: {details}", hint="The engine's log has the details.")
    if status in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
        # passed on, it would tell the caller that the caller's own key is wrong
        return EngineError(f"{label} refuses Tidegate's key ({status}): {details}", hint="Set api_key of this engine.")
    if status == "RESOURCE_EXHAUSTED" and "larger than max" in details:
        return EngineError(f"{label} sent an event that is too large: {details}", hint="Raise max_event_bytes.")
    return said_error(label, details, status)


def said_error(label: str, message: str, status: str = "UNKNOWN") -> TidegateError:
    """The error for what the engine itself said, with a gRPC status or, inside a stream of older servers, without."""
    message = _reason(message)
    if is_context(message):
        return ContextTooLong(f"{label}: {message}", hint="Shorten the prompt, or use a model with a larger context.", param="messages")
    return EngineRefused(
        f"{label} reports an error ({status}): {message}",
        engine_status=_REFUSED.get(status, 502),
        engine_code=status.lower(),
        hint=_HINTS.get(status, "The engine's own words say what it minds." if _REFUSED.get(status, 502) < 500 else "See the engine's log."),
    )


def _reason(said: str) -> str:
    """What was said, bounded. Of a traceback only its last line: that is the reason, the rest tells of the engine's inside."""
    if "Traceback (most recent call last)" in said:
        said = next((line.strip() for line in reversed(said.splitlines()) if line.strip() and not line.startswith(("At:", "  ", ";"))), said)
    return said.strip()[:_MAX_MESSAGE] or "no reason given"
