"""Every error a caller can meet, drawn once.

Each says what was wrong, where, and the way out (`hint`), and knows its machine code, its HTTP status and its log level. `retry_after_s` is
sent as `Retry-After` where it is known.

    TidegateError
    |-- BadRequest 400           what was sent cannot be understood
    |   |-- BodyTooLarge 413
    |   |-- HeadTooLarge 431
    |   |-- ContextTooLong 400   the prompt does not fit the model's context
    |   |-- HostileInput 400     the text holds what the door refuses
    |   |-- InputInvalid 422     business fields break the capability's input contract
    |   |-- ResumeLost 410       the rest of a stream is no longer there
    |   |-- ResumedElsewhere 409  a newer reader took the stream over
    |   `-- DocumentUnreadable 422  a file that was to be ingested cannot be read
    |-- Unauthorized 401, Forbidden 403, NotFound 404, MethodNotAllowed 405
    |-- RateLimited 429
    |-- Busy 429                 the wait would be too long; a place is booked for later
    |-- OutputInvalid 422        the model's output broke the capability's output contract
    |-- EngineError 502          the engine answered wrongly, or not at all
    |   |-- EngineRefused        the engine's own status, code and Retry-After, passed on
    |   |-- EngineDown 503
    |   |-- EngineNotAdmitted 503  the engine failed a check that it must pass
    |   |-- EngineCut 502        the stream ended before its end
    |   |-- EngineEmpty 502      the stream ended well but said nothing
    |   |-- EngineStalled 504
    |   `-- CannotContinue 502   the engine cannot go on from the middle of an answer
    |-- DeadlineExceeded 504
    |-- NoAnswer 503, 422        no rung of the capability's ladder could answer
    |-- StoreDown 503
    |   |-- EmbedderDown 503     texts cannot be turned into vectors
    |   `-- LimitsDown 503       what limits are counted in cannot be reached
    |-- ClientGone 499           nobody is left to answer
    |   `-- SlowReader 499       the client did not read, and was let go
    |-- Superseded 409           a newer message of the same conversation took its place
    |-- SettingsError            start-up: a setting is wrong
    `-- LocalPartError           start-up: a part on this machine cannot run
"""

from __future__ import annotations

import logging
from typing import ClassVar


class TidegateError(Exception):
    """Something went wrong inside Tidegate."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    level: ClassVar[int] = logging.ERROR
    #: OpenAI's `error.type`.
    type: ClassVar[str] = "server_error"

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def http_status(self) -> int:
        """The status that the caller gets; an engine's own status where the error carries one."""
        return self.status

    @property
    def public_code(self) -> str:
        """The machine code that the caller gets; an engine's own code where the error carries one."""
        return self.code


class BadRequest(TidegateError):
    """What was sent cannot be understood."""

    code = "bad_request"
    status = 400
    level = logging.INFO
    type = "invalid_request_error"


class BodyTooLarge(BadRequest):
    """The body is larger than `server.max_body_bytes`."""

    code = "body_too_large"
    status = 413


class HeadTooLarge(BadRequest):
    """The request's line and headers are too long."""

    code = "head_too_large"
    status = 431


class ContextTooLong(BadRequest):
    """The prompt does not fit the model's context."""

    code = "context_length_exceeded"


class HostileInput(BadRequest):
    """The text holds what the door refuses: see docs/door.md."""

    code = "hostile_input"


class InputInvalid(BadRequest):
    """The business fields break the capability's input contract."""

    code = "input_invalid"
    status = 422


class ResumeLost(BadRequest):
    """The rest of the stream is no longer there."""

    code = "resume_lost"
    status = 410


class ResumedElsewhere(BadRequest):
    """A newer reader took this stream over."""

    code = "resumed_elsewhere"
    status = 409


class DocumentUnreadable(BadRequest):
    """A file that was to be ingested cannot be read."""

    code = "document_unreadable"
    status = 422


class Unauthorized(BadRequest):
    """No key, or a key that is not known."""

    code = "invalid_api_key"
    status = 401
    type = "authentication_error"


class Forbidden(BadRequest):
    """The key is known but may not do this."""

    code = "forbidden"
    status = 403
    type = "permission_error"


class NotFound(BadRequest):
    """There is no such route, model, capability or flight."""

    code = "not_found"
    status = 404


class MethodNotAllowed(BadRequest):
    """The route exists, but not for this method."""

    code = "method_not_allowed"
    status = 405


class RateLimited(TidegateError):
    """A limit of the key, tenant or capability is used up."""

    code = "rate_limit_exceeded"
    status = 429
    level = logging.INFO
    type = "rate_limit_error"


class Busy(TidegateError):
    """All slots are taken and the wait would be too long. `retry_after_s` is when the place that was booked for this caller is due."""

    code = "busy"
    status = 429
    level = logging.INFO
    type = "rate_limit_error"


class OutputInvalid(TidegateError):
    """The model's output broke the capability's output contract."""

    code = "output_invalid"
    status = 422
    level = logging.WARNING


class EngineError(TidegateError):
    """The engine answered wrongly, or not at all."""

    code = "engine_error"
    status = 502
    type = "engine_error"
    #: The HTTP status that the engine itself gave; 0 where it gave none.
    engine_status: int = 0


class EngineRefused(EngineError):
    """The engine refused: its own status, code and `Retry-After` are passed on."""

    code = "engine_refused"

    def __init__(
        self,
        message: str,
        *,
        engine_status: int,
        engine_code: str | None = None,
        hint: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, hint=hint, param=param, retry_after_s=retry_after_s)
        self.engine_status = engine_status
        self.engine_code = engine_code

    @property
    def http_status(self) -> int:
        # A status below 400 from an engine that did not answer the question is a broken gateway, not a success.
        return self.engine_status if 400 <= self.engine_status <= 599 else self.status

    @property
    def public_code(self) -> str:
        return self.engine_code or self.code


class EngineDown(EngineError):
    """The engine cannot be reached."""

    code = "engine_down"
    status = 503
    #: Whether the request was sent, and may have been what killed it.
    reached: bool = False
    #: Whether it was the gateway itself that had no room for a connection: that says nothing of the engine.
    ours: bool = False


class EngineNotAdmitted(EngineError):
    """Every engine that serves the model failed a check that it must pass; see `tidegate check`."""

    code = "engine_not_admitted"
    status = 503


class EngineCut(EngineError):
    """The engine's stream ended before its end."""

    code = "engine_cut"


class EngineEmpty(EngineError):
    """The engine's stream ended well but said nothing."""

    code = "engine_empty"


class EngineStalled(EngineError):
    """The engine went silent for longer than the time-out."""

    code = "engine_stalled"
    status = 504


class CannotContinue(EngineError):
    """The engine cannot go on from the middle of an answer."""

    code = "cannot_continue"


class DeadlineExceeded(TidegateError):
    """The request's own time is used up. `stage`: the stage whose share it was, where it was one's own."""

    code = "deadline_exceeded"
    status = 504
    level = logging.WARNING

    def __init__(self, message: str, *, hint: str | None = None, stage: str = "") -> None:
        super().__init__(message, hint=hint)
        self.stage = stage


class NoAnswer(TidegateError):
    """No rung of the capability's ladder could answer: the capability's own code and message, and a ticket."""

    code = "no_answer"
    status = 503
    level = logging.WARNING

    def __init__(
        self, message: str, *, business_code: str, status: int, ticket: str, cause: str, hint: str | None = None, retry_after_s: float | None = None
    ) -> None:
        """`cause`: the code of the error for which the full answer failed; `status`: 422 where that was broken output, else 503."""
        super().__init__(message, hint=hint, retry_after_s=retry_after_s)
        self.business_code = business_code
        self.ticket = ticket
        self.cause = cause
        self._status = status

    @property
    def http_status(self) -> int:
        return self._status

    @property
    def public_code(self) -> str:
        return self.business_code


class StoreDown(TidegateError):
    """The database cannot be reached."""

    code = "store_down"
    status = 503


class EmbedderDown(StoreDown):
    """The embedder cannot be reached, has too much to do, or failed."""

    code = "embedder_down"


class OtherEmbedder(StoreDown):
    """The vectors of a collection are of another embedder than the one that runs: they cannot be compared."""

    code = "other_embedder"

    def __init__(self, collection: str, has: str, runs: str) -> None:
        """`has`, `runs`: fingerprints; `has` begins with `>` where the collection is on its way to the rest of it."""
        again = f"`tidegate ingest --reembed --collection {collection}`"
        if has.startswith(">"):
            what = f"The collection {collection!r} is being embedded anew, by {has[1:]}, and not all of its documents are."
            hint = f"Wait for it; where nobody does it any more, {again} goes on with it."
        else:
            what = f"The vectors of the collection {collection!r} are of the embedder {has}, and {runs} runs."
            hint = f"Embed all of it anew with {again}, or start the other embedder."
        super().__init__(what, hint=hint)


class LimitsDown(StoreDown):
    """What the limits are counted in cannot be reached."""

    code = "limits_down"


class ClientGone(TidegateError):
    """The client left; nobody is left to answer."""

    code = "client_gone"
    status = 499
    level = logging.INFO


class Superseded(TidegateError):
    """A newer message of the same conversation took this one's place. `by` is the trace_id of the newer one."""

    code = "superseded"
    status = 409
    level = logging.INFO
    type = "conflict_error"

    def __init__(self, by: str) -> None:
        super().__init__(
            f"A newer message of this conversation took the place of this one: {by}.",
            hint="Read the answer to the newer message. Without barge-in, both are answered.",
        )
        self.by = by


class SlowReader(ClientGone):
    """The client did not read what it had asked for, and was let go."""

    code = "slow_reader"


class SettingsError(TidegateError):
    """A setting is wrong."""

    code = "settings_invalid"


class LocalPartError(TidegateError):
    """A part on this machine cannot run."""

    code = "local_part"
