"""What the scripted engine was asked, and the words that it will say: also from the middle of an answer on."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tidegate.bench.directives import AT_TOKEN, Directives, parse, pieces
from tidegate.bench.tokens import OTHERS, WORDS, after_mark, decode, encode, render
from tidegate.core.errors import BadRequest

MODEL = "scripted"
Kind = Literal["chat", "completion"]
#: Tokens of an answer that is not to end by itself.
_MOST_TOKENS = 100_000


class Request(msgspec.Struct):
    """What the engine was asked, as far as the script cares.

    `words`: the tokens that it will say, and `finish` why it ends there. `prompt_ids`: where the prompt came as ids. `tells_ids`: each event
    carries the ids of its tokens, as vLLM's do.
    """

    kind: Kind
    stream: bool
    usage: bool
    prompt: str
    orders: Directives
    words: list[str]
    finish: str
    prompt_ids: list[int] | None = None
    tells_ids: bool = False
    #: Milliseconds before each token but the first, where they are not all `orders.between_ms`.
    gaps: list[float] | None = None
    #: Its tokens come when the engine's steps give them (bench/steps.py), not after times of its own.
    in_steps: bool = False


def read(kind: Kind, body: dict[str, Any]) -> Request:
    """The request in a body; `max_tokens` (or `max_completion_tokens`) bounds the answer as with a real engine.

    A prompt of token ids, or a last message that is to be continued (`continue_final_message`), is the middle of an answer: what of the answer
    stands in it already is not said again, nor does a fault happen again whose token lies there. Raises BadRequest for orders and ids that are
    not understood.
    """
    options = body.get("stream_options")
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    # Load tools ask for answers of an exact length: without an end of its own, an answer has as many tokens as it may have.
    endless = min(limit, _MOST_TOKENS) if body.get("ignore_eos") is True and isinstance(limit, int) else 0
    ids = body.get("prompt")
    if isinstance(ids, list) and ids and all(type(number) is int for number in ids):
        prompt, words, orders = _go_on(ids, endless)
    elif body.get("continue_final_message") is True and body.get("messages"):
        *before, last = body["messages"]
        begun = [*encode(render(before), special=True), *encode(str(last.get("content")), special=False)]
        ids, (prompt, words, orders) = None, _go_on(begun, endless)
    else:
        ids, prompt = None, prompt_of(body)
        orders = parse(prompt)
        words = _script(orders, endless)
    banned = _banned(body.get("logit_bias"))
    if banned:
        words = [_allowed(word, banned) for word in words]
    finish = "length" if 0 < endless <= len(words) else "stop"
    if isinstance(limit, int) and 0 < limit < len(words):
        words, finish = words[:limit], "length"
        if ids is not None and orders.at >= limit and orders.fault in AT_TOKEN:
            orders.fault = "none"
    return Request(
        kind, body.get("stream") is True, isinstance(options, dict) and options.get("include_usage") is True, prompt, orders, words, finish,
        ids, body.get("return_token_ids") is True,
    )  # fmt: skip


def prompt_of(body: dict[str, Any]) -> str:
    """All text of the messages or the prompt, in order, one a line. Raises BadRequest for ids that are not of the vocabulary."""
    texts: list[str] = []

    def collect(value: Any) -> None:
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, list):
            for item in value:
                collect(item)
        elif isinstance(value, dict):
            collect(value.get("content"))
            collect(value.get("text"))

    collect(body.get("messages"))
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and all(type(number) is int for number in prompt):
        texts.append(_decoded(prompt).decode("utf-8", "replace"))
    else:
        collect(prompt)
    return "\n".join(texts)


def _script(orders: Directives, least: int = 0) -> list[str]:
    """All tokens of the answer, at least so many where the prompt does not order the words."""
    if orders.answer is not None:
        return pieces(orders.answer)
    count = max(orders.tokens, least)
    if orders.word is not None:
        return [orders.word] * count
    return [WORDS[number % len(WORDS)] for number in range(count)]


def _go_on(ids: list[int], endless: int) -> tuple[str, list[str], Directives]:
    """The text of a prompt of ids, the tokens that are left to say, and the orders with their fault's place counted from here.

    `endless`: tokens that the answer still has where it is not to end by itself.
    """
    at = after_mark(ids)
    if at is not None:
        said = _decoded(ids[at:])
        prompt = _decoded(ids[:at]).decode("utf-8", "replace")
        orders = parse(prompt)
        words, done, _ = _rest(_script(orders, endless and endless + len(ids)), said)
    else:
        whole = _decoded(ids)
        prompt = whole.decode("utf-8", "replace")
        orders = parse(prompt)
        words, done = _rest_of_completion(_script(orders, endless and endless + len(ids)), whole)
    orders.at -= done
    if orders.fault == "cut_bytes" or (orders.fault in AT_TOKEN and orders.at <= 0):
        orders.fault = "none"
    return prompt, words, orders


def _rest_of_completion(script: list[str], prompt: bytes) -> tuple[list[str], int]:
    """Where nothing marks the answer's beginning: what stands behind the orders is its beginning, else the longest end of the prompt that is."""
    behind = prompt[prompt.rfind(b"##") + 2 :] if b"##" in prompt else prompt
    longest = sum(max(len(word.encode()), *(len(other) for other in OTHERS)) for word in script)
    for at in range(max(0, len(behind) - longest), len(behind) + 1):
        words, done, exact = _rest(script, behind[at:])
        if exact:
            return words, done
    return script, 0


def _rest(script: list[str], said: bytes) -> tuple[list[str], int, bool]:
    """The tokens that come after `said`, how many were begun, and whether all of `said` is the script's.

    A token that was said in part is the rest of its bytes (`surrogateescape`). A token may have been said as one of OTHERS. Where something stands
    that is not the script's, the script goes on with its next token.
    """
    for number, word in enumerate(script):
        if not said:
            return script[number:], number, True
        ways = [way.encode() for way in (word, *OTHERS)]
        whole = next((way for way in ways if said.startswith(way)), None)
        if whole is not None:
            said = said[len(whole) :]
            continue
        begun = next((way for way in ways if way.startswith(said)), None)
        if begun is None:
            return script[number:], number, False
        return [begun[len(said) :].decode("utf-8", "surrogateescape"), *script[number + 1 :]], number + 1, True
    return [], len(script), not said


def _decoded(ids: list[int]) -> bytes:
    try:
        return decode(ids)
    except ValueError as error:
        raise BadRequest(str(error), hint="POST /tokenize makes ids of a text.", param="prompt") from None


def _banned(bias: Any) -> frozenset[int]:
    """The ids that may not be said: those with a bias of -100 or less, or false, as llama.cpp has it."""
    pairs = bias.items() if isinstance(bias, dict) else bias if isinstance(bias, list) else ()
    banned = set()
    for number, value in pairs:
        if value is False or (isinstance(value, (int, float)) and value is not True and value <= -100):
            banned.add(int(number))
    return frozenset(banned)


def _allowed(word: str, banned: frozenset[int]) -> str:
    """The word, or where its first token is banned the first of OTHERS that is not."""
    return next((way for way in (word, *OTHERS) if encode(way, special=False)[:1][0] not in banned), word) if word else word


def prompt_tokens(request: Request) -> int:
    """Words, or ids where the prompt came as ids."""
    return len(request.prompt.split()) if request.prompt_ids is None else len(request.prompt_ids)
