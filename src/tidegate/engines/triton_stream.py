"""A running generation on Triton: messages of a gRPC stream in, chunks out, and a judged end."""

from __future__ import annotations

import asyncio
import codecs
import time
from typing import Any

from tidegate.core.chunk import Chunk, End, Usage
from tidegate.core.errors import EngineCut, EngineEmpty, EngineError, EngineStalled, TidegateError
from tidegate.core.flight import Flight
from tidegate.engines.answer import estimate_tokens
from tidegate.engines.stream import Take
from tidegate.engines.triton_client import TritonClient
from tidegate.engines.triton_errors import said_error
from tidegate.engines.triton_model import TritonModel, unpack_number, unpack_texts
from tidegate.engines.wire import Patience

_FINAL = "triton_final_response"
#: What a tensor of a response means: nothing to us, how it ended, the prompt's tokens, the answer's text, new tokens of it.
_NOTHING, _FINISH, _PROMPT_TOKENS, _TEXT, _NEW_TOKENS = range(5)
#: What backends call the end of an answer. What vLLM's says while there is none is "None".
_ENDS: dict[str, End] = {"stop": "stop", "eos": "stop", "eos_token": "stop", "end_id": "stop", "stop_words": "stop", "length": "length"}
_NO_END = frozenset({"", "None", "none", "not_finished"})
_GIVEN_UP = frozenset({"abort", "cancelled", "error"})


class TritonStream:
    """An `EngineStream` over one gRPC call.

    gRPC gives one message at a time, so a batch is what one message holds; it is stamped when gRPC hands it over. Not reading holds the engine
    back by HTTP/2's flow control.
    """

    __slots__ = (
        "_aborted", "_answer_tokens", "_call", "_client", "_continues", "_deadline_ns", "_decode", "_ended", "_events", "_failure", "_finish",
        "_first", "_flight", "_idle_ns", "_label", "_loop", "_max_tokens", "_model", "_new", "_new_data", "_prompt_bytes",
        "_prompt_tokens", "_roles", "_text_bytes", "_timer", "_told",
    )  # fmt: skip

    def __init__(
        self, client: TritonClient, call: Any, first: tuple[Any, int], model: TritonModel, flight: Flight, patience: Patience, *,
        prompt_bytes: int, max_tokens: int | None, continues: bool = False,
    ) -> None:  # fmt: skip
        """`first`: the message that came first, and when. `max_tokens`: what the call was bounded to. `continues`: the answer was begun before,
        so that it may end without a word more."""
        self._client = client
        self._call = call
        self._first: tuple[Any, int] | None = first
        self._model = model
        self._flight = flight
        self._label = client.label
        self._loop = asyncio.get_running_loop()
        self._idle_ns = int(patience.inter_token_s * 1e9)
        self._deadline_ns = 0
        self._timer: asyncio.TimerHandle | None = None
        self._roles = dict.fromkeys(model.outputs, _NOTHING) | {
            tensor.name: role
            for tensor, role in (
                (model.finish, _FINISH), (model.prompt_tokens, _PROMPT_TOKENS), (model.answer_tokens, _NEW_TOKENS), (model.answer, _TEXT)
            )
            if tensor is not None
        }  # fmt: skip
        self._told = [b"", b"", b""]  # the newest bytes of those that mostly stay the same
        self._new_data = b""
        self._new = 0
        self._decode = codecs.getincrementaldecoder("utf-8")("strict").decode
        self._prompt_bytes = prompt_bytes
        self._max_tokens = max_tokens
        self._prompt_tokens = -1
        self._answer_tokens = -1
        self._text_bytes = 0
        self._events = 0
        self._finish: End | None = None
        self._failure: TidegateError | None = None
        self._continues = continues
        self._ended = False
        self._aborted = False

    @property
    def usage(self) -> Usage:
        """Tokens so far: as the model counts them, else an estimate."""
        exact = self._prompt_tokens >= 0 and self._answer_tokens >= 0
        return Usage(
            self._prompt_tokens if self._prompt_tokens >= 0 else estimate_tokens(self._prompt_bytes),
            self._answer_tokens if self._answer_tokens >= 0 else estimate_tokens(self._text_bytes),
            exact=exact,
        )

    def abort(self) -> None:
        """Cancel the call at once. No-op after the end. Whether the model stops with it is the model's affair."""
        self._disarm()
        if not self._ended:
            self._ended = self._aborted = True
            self._call.cancel()

    async def relay(self, take: Take) -> None:
        """See `core.ports.EngineStream.relay`."""
        try:
            while True:
                if self._failure is not None:
                    raise self._failure
                if self._ended:
                    return
                if self._first is not None:
                    (message, at_ns), self._first = self._first, None
                else:
                    message = await self._read()
                    at_ns = time.perf_counter_ns()
                    if message is None:
                        return
                chunks: list[Chunk] = []
                try:
                    self._take_in(message, at_ns, chunks)
                except TidegateError as error:
                    self._failure = error  # what came before it is delivered first
                    self._call.cancel()
                    self._ended = True
                if chunks:
                    rest = take(chunks)
                    if rest is not None:
                        await rest
        except asyncio.CancelledError:
            self.abort()
            raise
        finally:
            self._disarm()

    # --

    async def _read(self) -> Any:
        """The next message; None where the stream was aborted meanwhile."""
        self._deadline_ns = time.perf_counter_ns() + self._idle_ns
        if self._timer is None:
            self._timer = self._loop.call_later(self._idle_ns / 1e9, self._look)
        try:
            return await self._client.read(self._call, began=self._events > 0)
        except asyncio.CancelledError:
            # gRPC says so of a call that was cancelled here, also where it is not this task that was cancelled
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            if self._failure is not None:
                raise self._failure from None
            if self._aborted:
                return None
            raise
        except TidegateError as error:
            self._ended = True
            self._failure = error
            raise
        finally:
            self._deadline_ns = 0

    def _look(self) -> None:
        """The timer fired. Most often the deadline has moved on since it was set: then it is only set again."""
        self._timer = None
        left_ns = self._deadline_ns - time.perf_counter_ns()
        if self._deadline_ns and left_ns <= 0:
            self._failure = EngineStalled(
                f"{self._label} was silent while we waited for the next token (inter_token_s).", hint="Is the engine overloaded or hung?"
            )
            self._ended = True
            self._call.cancel()
        elif self._deadline_ns:
            self._timer = self._loop.call_later(left_ns / 1e9, self._look)
        # else nobody waits: a slow reader is not the engine's fault; the next read sets the timer

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _take_in(self, message: Any, at_ns: int, chunks: list[Chunk]) -> None:
        """One message: adds its chunks. Raises EngineError and its kin."""
        if message.error_message:
            raise said_error(self._label, message.error_message)
        response = message.infer_response
        text = self._outputs(response)
        self._events += 1
        if text:
            self._text_bytes += len(text) if text.isascii() else len(text.encode())
            chunks.append(Chunk(at_ns, "text", text))
        parameters = response.parameters
        final = parameters[_FINAL].bool_param if _FINAL in parameters else not self._model.decoupled
        if final:
            self._end(at_ns, chunks)

    def _outputs(self, response: Any) -> str:
        """Reads the tensors of one response; gives its text."""
        roles, raw = self._roles, response.raw_output_contents
        outputs = response.outputs
        if len(outputs) > len(raw):
            raise EngineError(f"{self._label} sent tensors without their bytes.", hint="Does its model keep to its configuration?")
        text = ""
        try:
            for output, data in zip(outputs, raw, strict=False):  # for every token: each look into a message costs
                role = roles.get(output.name)
                if role == _TEXT:
                    size = len(data) - 4
                    one = size >= 0 and int.from_bytes(data[:4], "little") == size  # nearly always
                    text += self._decode(data[4:] if one else b"".join(unpack_texts(data)))
                elif role is None:
                    raise EngineError(
                        f"{self._label} answered with {output.name[:80]}, which its configuration does not name.",
                        hint="Was the model loaded anew? Then ask again.",
                    )
                elif role == _NEW_TOKENS:
                    if data:
                        if data != self._new_data:
                            self._new_data, self._new = data, unpack_number(data, output.datatype)
                        self._answer_tokens = max(self._answer_tokens, 0) + self._new
                elif role and data and data != self._told[role]:
                    self._told[role] = data
                    if role == _FINISH:
                        self._read_finish(b"".join(unpack_texts(data)[:1]).decode("utf-8", "replace"))
                    else:
                        self._prompt_tokens = unpack_number(data, output.datatype)
        except UnicodeDecodeError:
            raise EngineError(f"{self._label} sent text that is not UTF-8.", hint="Its model must answer in UTF-8.") from None
        except ValueError as error:
            raise EngineError(
                f"{self._label} sent a tensor that cannot be read: {error}.", hint="Does its model keep to its configuration?"
            ) from None
        return text

    def _read_finish(self, reason: str) -> None:
        if reason in _NO_END:
            return
        if reason in _GIVEN_UP:
            raise EngineCut(f"{self._label} gave the answer up (finish_reason {reason!r}).", hint="The engine's log has the details.")
        end = _ENDS.get(reason)
        if end is None:
            self._flight.decide("engine_finish_unknown", finish_reason=reason[:64], taken_as="stop")
        self._finish = end or "stop"

    def _end(self, at_ns: int, chunks: list[Chunk]) -> None:
        """The model said that it is done: judge it, and complete what it left out."""
        try:
            self._decode(b"", True)
        except UnicodeDecodeError:
            raise EngineError(f"{self._label} ended in the middle of a character.", hint="Its model must answer in whole UTF-8.") from None
        usage = self.usage
        end = self._finish
        if end is None:
            bounded = self._max_tokens is not None and self._answer_tokens >= self._max_tokens
            end = "length" if bounded else "stop"
            self._flight.decide("engine_finish_missing", taken_as=end)
        if not self._text_bytes and end == "stop" and not self._continues:
            raise EngineEmpty(f"{self._label} ended its answer without saying anything.", hint="Look at the prompt and the stop strings.")
        if not usage.exact:
            self._flight.decide("usage_estimated")
        self._ended = True
        self._disarm()
        self._client.drain(self._call)
        chunks.append(Chunk(at_ns, "notice", finish=end))
        chunks.append(Chunk(at_ns, "usage", usage=usage))
