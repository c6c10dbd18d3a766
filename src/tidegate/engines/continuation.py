"""Going on from the middle of an answer: a completion whose prompt is the ids of the first prompt and of what was said.

For servers with /tokenize, /detokenize and /apply-template as llama.cpp has them; other adapters replace how these are asked. Text from outside
stays text in such a prompt.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from tidegate.core.ask import EngineCall, Said
from tidegate.core.chunk import Chunk, End, Usage
from tidegate.core.errors import CannotContinue, EngineError
from tidegate.core.flight import Flight
from tidegate.core.ports import EngineStream
from tidegate.engines.openai_http import OpenAIHttp
from tidegate.engines.prompt_ids import Message, first_tokens, may_hold_control, prompt_ids, texts_with_control
from tidegate.engines.seam import watched
from tidegate.engines.stream import Stream
from tidegate.engines.vllm_stream import Begun, VllmDialect

#: Fields of a chat that make its prompt: the template reads them, a completion does not.
_PROMPT_FIELDS = frozenset({
    "messages", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "reasoning_effort", "reasoning_format",
})  # fmt: skip
#: Fields of a chat whose contents the template writes into the prompt.
_RENDERED = ("response_format", "tools", "tool_choice")
#: Fields of a chat that a completion has another name for, or that nobody needs to answer.
_OTHER_FIELDS = frozenset({
    "model", "stream", "prompt", "max_tokens", "max_completion_tokens", "n_predict", "response_format", "tool_choice", "parallel_tool_calls",
    "metadata", "store", "service_tier", "logprobs", "top_logprobs", "modalities", "separate_reasoning", "verbosity",
})  # fmt: skip
#: Fields by which a call asks for something that only the chat route does.
_CHAT_ONLY = ("tools", "functions", "function_call", "logprobs", "top_logprobs", "audio", "web_search_options")
#: Fields that shape an answer from its first token on. An engine would begin the shape anew in the middle.
_SHAPES = ("grammar", "json_schema", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
#: Tokens that one character can take.
_TOKENS_OF_A_CHARACTER = 4
#: Times that a first token is drawn anew because what it says begins like what is forbidden.
_DRAWS = 8
#: Stands between texts in one question to /tokenize; it is no token of any model.
_BETWEEN = -1


class Step(msgspec.Struct):
    """What was drawn: its ids (none at the end), its text, how the answer ended with it (None: it goes on), and how many tokens it is."""

    ids: list[int]
    text: str
    end: End | None
    tokens: int = 1


class Continuing(OpenAIHttp):
    """An engine whose server has /tokenize, /detokenize and /apply-template as llama.cpp has them, and takes prompts of token ids."""

    async def continue_from(self, call: EngineCall, said: Said, flight: Flight, *, forbid: str = "") -> EngineStream:
        """See `core.ports.Engine.continue_from`."""
        body = body_of(call)
        reason = middle_impossible(body)
        if reason:
            raise impossible(self.label, reason)
        flight.engine = self.name
        prompt = await self._prompt(call.kind, body, flight) + await self._said_ids(said, flight)
        flight.lap("engine.tokenize")
        left = tokens_left(body, said.tokens)
        if left == 0:
            return _over([], "length", Usage(len(prompt), 0))
        fields = completion_fields(body)
        stop = fields.get("stop")
        if not forbid:
            return watched(await self._rest(by_ids(call.model, fields, prompt, left), flight), stop, said.text)
        step = await self._first_step(call.model, fields, prompt, forbid, left, flight)
        flight.lap("engine.forbid")
        usage = Usage(len(prompt), step.tokens)
        chunks = [Chunk(time.perf_counter_ns(), "text", step.text, token_ids=step.ids)] if step.text else []
        if left is not None:
            left -= step.tokens
        if step.end is not None or left == 0:
            return watched(_over(chunks, step.end or "length", usage), stop, said.text, step.text)
        rest = await self._rest(by_ids(call.model, fields, [*prompt, *step.ids], left), flight, begun=step.tokens)
        return watched(Begun(chunks, rest, usage), stop, said.text, step.text)

    async def _rest(self, sent: EngineCall, flight: Flight, begun: int = 0) -> Stream:
        return await self.open(sent, flight, VllmDialect(self.label, forwards=False, continues=True, begun=begun))

    # -- what adapters replace

    async def one_token(self, model: str, fields: dict[str, Any], prompt: list[int]) -> Step:
        """The next token after a prompt of ids."""
        raise NotImplementedError

    async def why_not_by_ids(self, prompt: str) -> str:
        """Why an answer to this rendered prompt cannot be had as a completion; "" where it can."""
        return ""

    # -- prompts

    async def chat_ids(self, body: dict[str, Any], foreign: Collection[str]) -> list[int] | None:
        """The ids of a chat's prompt with each text of `foreign` as plain text; None where the template does not hand texts on as they are.

        Raises CannotContinue where the answer could not be had as a completion.
        """
        async def render(messages: list[Message]) -> str:
            prompt = await self.render(body, messages)
            why = await self.why_not_by_ids(prompt)
            if why:
                raise CannotContinue(f"{self.label} cannot take this chat as token ids: {why}.", hint="Ask again from the beginning.")
            return prompt

        return await prompt_ids(body["messages"], foreign, render, self.tokenize, begin=await self._begin())

    async def prompt_size(self, kind: str, body: dict[str, Any]) -> int:
        """How many tokens the engine makes of a call's prompt, tools included. Raises TidegateError."""
        if kind == "completion":
            return len(await self._prompt(kind, body, Flight("/tokenize")))
        prompt = await self.render(body, body["messages"])
        return len(await self._begin()) + len((await self._tokenize([prompt], True))[0])

    async def render(self, body: dict[str, Any], messages: list[Message]) -> str:
        """The prompt that the engine's own template makes of messages. Raises TidegateError."""
        fields = {name: value for name, value in body.items() if name in _PROMPT_FIELDS or name in _RENDERED}
        said = await self.post_json(f"{self.root}/apply-template", {**fields, "messages": messages})
        prompt = said.get("prompt")
        if not isinstance(prompt, str):
            raise EngineError(f"{self.label} answers /apply-template without a prompt.", hint="Is it a server like llama.cpp's?")
        return prompt

    async def tokenize(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        """The ids of each text, in one question; see `prompt_ids.Tokenize`. Raises TidegateError."""
        if special:
            return await self._tokenize(texts, special)
        # Some vocabularies put a blank before every text, as if a sentence began there: these texts stand behind a line end instead.
        line, *found = await self._tokenize(["\n", *texts], special)
        if len(line) > 1:
            found = [ids[len(line) :] for ids in await self._tokenize(["\n" + text for text in texts], special)]
        return found

    async def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ids. Raises TidegateError."""
        return str((await self.post_json(f"{self.root}/detokenize", {"tokens": ids})).get("content", ""))

    async def _tokenize(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        content = [part for text in texts for part in (text, _BETWEEN)][:-1]
        said = await self.post_json(f"{self.root}/tokenize", {"content": content, "parse_special": special})
        found: list[list[int]] = [[]]
        for token in said.get("tokens") or ():
            if token == _BETWEEN:
                found.append([])
            else:
                found[-1].append(token)
        if len(found) != max(1, len(texts)):
            raise EngineError(f"{self.label} answers /tokenize with ids for {len(found)} texts, not {len(texts)}.", hint="It may be too old.")
        return found[: len(texts)]

    async def _begin(self) -> list[int]:
        """What the engine puts before every prompt."""
        said = await self.post_json(f"{self.root}/tokenize", {"content": "", "add_special": True})
        return [token for token in said.get("tokens") or () if isinstance(token, int)][:1]

    async def _prompt(self, kind: str, body: dict[str, Any], flight: Flight) -> list[int]:
        """The ids of the prompt as the first run had it."""
        if kind == "completion":
            prompt = body.get("prompt")
            if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
                prompt = prompt[0]
            if isinstance(prompt, str):
                return [*await self._begin(), *(await self._tokenize([prompt], True))[0]]
            return list(prompt or ())
        messages = body["messages"]
        foreign: set[str] = set()
        if may_hold_control(messages):
            foreign, elsewhere = await texts_with_control(messages, self.tokenize)
            if elsewhere:
                raise CannotContinue(f"{self.label} cannot go on: a control token stands in a name of a message.", hint="Leave it out.")
        ids = await self.chat_ids(body, foreign)
        if ids is None:
            raise CannotContinue(f"{self.label} cannot go on: its chat template changes the texts of messages.", hint="Ask anew.")
        if foreign:
            flight.decide("special_tokens_as_text", count=len(foreign))
        return ids

    async def _said_ids(self, said: Said, flight: Flight) -> list[int]:
        if said.token_ids is not None:
            return said.token_ids
        if not said.text:
            return []
        (ids,) = await self.tokenize([said.text], False)
        flight.decide("retokenised", tokens=len(ids), said=said.tokens)
        return ids

    # -- the first token without what is forbidden

    async def _first_step(
        self, model: str, fields: dict[str, Any], prompt: list[int], forbid: str, left: int | None, flight: Flight
    ) -> Step:
        """The next tokens up to a whole character, the first of them none that `forbid` begins with. A bias holds for a whole call, so this is a
        call of its own."""
        banned = await first_tokens(forbid, self.tokenize)
        for draw in range(_DRAWS):
            biased = {**fields, "logit_bias": with_banned(fields.get("logit_bias"), banned)}
            step = await self.one_token(model, biased, prompt)
            while step.end is None and step.text.endswith("\ufffd") and len(step.ids) < min(_TOKENS_OF_A_CHARACTER, left or 9):
                more = await self.one_token(model, fields, [*prompt, *step.ids])  # half a character: its other tokens
                ids = [*step.ids, *more.ids]
                step = Step(ids, await self.detokenize(ids), more.end, step.tokens + more.tokens)
            if not step.ids or not begins_alike(step.text, forbid):
                flight.decide("continue_without", banned=len(banned), draws=draw + 1)
                return step
            banned.append(step.ids[0])  # a longer token that holds what is forbidden: it is not among the beginnings
        raise CannotContinue(f"{self.label} offers nothing but what is forbidden.", hint="Go on from an earlier place.")


def body_of(call: EngineCall) -> dict[str, Any]:
    """The call's fields, also where only the caller's own bytes are there."""
    body: dict[str, Any] = call.body if call.body or call.raw is None else msgspec.json.decode(call.raw)
    return body


def chat_only(body: dict[str, Any]) -> str:
    """Why the call needs the chat route; "" where a completion can answer it."""
    for name in _CHAT_ONLY:
        if body.get(name) not in (None, False, [], {}, 0, "none"):
            return f"{name} is understood by the chat route only"
    if body.get("modalities") not in (None, ["text"]):
        return "modalities are understood by the chat route only"
    kind = body["response_format"].get("type") if isinstance(body.get("response_format"), dict) else None
    if kind not in (None, "text", "json_object", "json_schema"):
        return f"response_format {str(kind)[:40]!r} is understood by the chat route only"
    for message in body.get("messages") or ():
        content = message.get("content")
        if isinstance(content, list) and any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
            return "a message holds more than text"
    return ""


def middle_impossible(body: dict[str, Any]) -> str:
    """Why nobody can go on from the middle of the call's answer; "" where one can."""
    reason = chat_only(body)
    if reason:
        return reason
    prompt = body.get("prompt")
    if isinstance(prompt, list) and not all(isinstance(one, int) for one in prompt) and not (len(prompt) == 1 and isinstance(prompt[0], str)):
        return "it has several prompts"
    if body.get("echo") or body.get("suffix"):
        return "echo and suffix belong to the beginning of an answer"
    shape = next((name for name in _SHAPES if body.get(name) not in (None, "", {}, [])), None)
    if shape is None and isinstance(body.get("response_format"), dict) and body["response_format"].get("type", "text") != "text":
        shape = "response_format"
    return f"{shape} shapes the answer from its first token on" if shape else ""


def completion_fields(body: dict[str, Any]) -> dict[str, Any]:
    """The fields of a completion that answers as the call's own route would."""
    fields = {name: value for name, value in body.items() if name not in _PROMPT_FIELDS and name not in _OTHER_FIELDS and value is not None}
    shape = body.get("response_format")
    if isinstance(shape, dict) and shape.get("type") == "json_schema":
        fields["json_schema"] = (shape.get("json_schema") or {}).get("schema", {})
    elif isinstance(shape, dict) and shape.get("type") == "json_object":
        fields["json_schema"] = shape.get("schema", {})
    return fields


def by_ids(model: str, fields: dict[str, Any], prompt: list[int], limit: int | None) -> EngineCall:
    """A completion call whose prompt is ids."""
    body = {**fields, "prompt": prompt, "cache_prompt": True}
    return EngineCall("completion", model, body if limit is None else {**body, "max_tokens": limit})


def tokens_left(body: dict[str, Any], said: int = 0) -> int | None:
    """How many tokens the call lets come after `said`; None where it sets no bound."""
    for name in ("max_completion_tokens", "max_tokens", "n_predict"):
        limit = body.get(name)
        if isinstance(limit, int) and limit >= 0:
            return max(0, limit - said)
    return None


def left_to_say(label: str, body: dict[str, Any], said: Said, reason: str) -> int | None:
    """Tokens that may come behind what was said, for routes that cannot be asked for none; None where the call sets no bound.

    Raises CannotContinue where there are none, or where there is a `reason` already.
    """
    left = tokens_left(body, said.tokens)
    if reason or left == 0:
        raise impossible(label, reason or "it has as many tokens as it may have")
    return left


def impossible(label: str, reason: str) -> CannotContinue:
    """The error for an answer that cannot be gone on with."""
    return CannotContinue(f"{label} cannot go on from the middle of this answer: {reason}.", hint="Ask again from the beginning.")


def with_banned(bias: Any, banned: Sequence[int]) -> dict[str, Any] | list[Any]:
    """The caller's `logit_bias`, in whichever form it came, and a ban on these ids."""
    if isinstance(bias, list):
        return [*bias, *([token, False] for token in banned)]
    return {**(bias or {}), **{str(token): False for token in banned}}


def begins_alike(text: str, forbid: str) -> bool:
    """Whether `text` is a beginning of `forbid` or begins with it; blanks before them and capitals make no difference."""
    text, forbid = text.lstrip().casefold(), forbid.lstrip().casefold()
    return bool(text) and (forbid.startswith(text) or text.startswith(forbid))


def _over(chunks: list[Chunk], end: End, usage: Usage) -> Begun:
    """A stream that is at its end already."""
    at_ns = time.perf_counter_ns()
    return Begun([*chunks, Chunk(at_ns, "notice", finish=end), Chunk(at_ns, "usage", usage=usage)], None, usage)
