"""What a request of the OpenAI-compatible routes may say. An unknown field is refused by name: what is silently dropped is believed to work."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from tidegate.core.ask import ShowsUsage
from tidegate.core.errors import BadRequest
from tidegate.core.nesting import MAX_DEPTH, too_deep
from tidegate.core.plugins import nearest

NUMBER = (int, float)
_TEXT, _BOOL, _LIST, _OBJECT = (str,), (bool,), (list,), (dict,)
Fields = dict[str, tuple[type, ...]]

_SHARED: Fields = {
    "model": _TEXT, "stream": _BOOL, "stream_options": _OBJECT, "temperature": NUMBER, "top_p": NUMBER, "n": (int,), "max_tokens": (int,),
    "stop": (str, list), "seed": (int,), "frequency_penalty": NUMBER, "presence_penalty": NUMBER, "logit_bias": _OBJECT, "user": _TEXT,
    # Beyond OpenAI: what vLLM, SGLang, TGI and llama.cpp take; an engine that does not know one says so itself.
    "top_k": (int,), "min_p": NUMBER, "typical_p": NUMBER, "repetition_penalty": NUMBER, "repeat_penalty": NUMBER, "min_tokens": (int,),
    "ignore_eos": _BOOL, "stop_token_ids": _LIST, "skip_special_tokens": _BOOL, "include_stop_str_in_output": _BOOL, "grammar": _TEXT,
    "structured_outputs": _OBJECT, "guided_json": (str, dict), "guided_regex": _TEXT, "guided_choice": _LIST, "guided_grammar": _TEXT,
    "cache_prompt": _BOOL, "return_token_ids": _BOOL, "priority": (int,), "samplers": _LIST,
}
CHAT: Fields = {
    **_SHARED, "messages": _LIST, "max_completion_tokens": (int,), "response_format": _OBJECT, "tools": _LIST, "tool_choice": (str, dict),
    "parallel_tool_calls": _BOOL, "functions": _LIST, "function_call": (str, dict), "logprobs": _BOOL, "top_logprobs": (int,),
    "reasoning_effort": _TEXT, "verbosity": _TEXT, "metadata": _OBJECT, "store": _BOOL, "service_tier": _TEXT, "modalities": _LIST,
    "audio": _OBJECT, "prediction": _OBJECT, "prompt_cache_key": _TEXT, "prompt_cache_retention": _TEXT, "safety_identifier": _TEXT,
    "web_search_options": _OBJECT, "chat_template_kwargs": _OBJECT, "add_generation_prompt": _BOOL, "continue_final_message": _BOOL,
    "separate_reasoning": _BOOL, "reasoning_format": _TEXT,
}
COMPLETION: Fields = {**_SHARED, "prompt": (str, list), "suffix": _TEXT, "echo": _BOOL, "best_of": (int,), "logprobs": (int,)}
EMBEDDING: Fields = {"model": _TEXT, "input": (str, list), "encoding_format": _TEXT, "dimensions": (int,), "user": _TEXT, "input_type": _TEXT}

#: Our own member of `stream_options`: tell the tokens so far with every batch of events.
CONTINUOUS_USAGE = "continuous_usage"

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_MESSAGE = frozenset({
    "role", "content", "name", "tool_calls", "tool_call_id", "function_call", "refusal", "audio", "annotations", "reasoning",
    "reasoning_content", "prefix",
})
_NAMES = {str: "text", bool: "true or false", list: "a list", dict: "an object", int: "a whole number", float: "a number"}
_decode = msgspec.json.Decoder().decode
_LARGE_BYTES = 4096
#: The escape of half a surrogate pair: a first half without a second, or a second without a first.
_LONE_HALF = re.compile(
    r"(?<!\\)(?:\\\\)*(?:\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*(?P<half>\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|[c-fC-F][0-9a-fA-F]{2}))"
)


def decode_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises BadRequest that says where it is broken."""
    if not body:
        raise BadRequest("The body is empty.", hint="Send a JSON object.")
    try:
        fields = _decode(body)
    except UnicodeDecodeError as error:
        raise BadRequest(f"The body is not UTF-8: {error.reason} at byte {error.start}.", hint="Encode the body as UTF-8.") from None
    except msgspec.DecodeError as error:
        raise _not_json(body, error) from None
    except RecursionError:
        raise _too_deep() from None
    # In a small body counting brackets costs next to nothing, and only one with many of them is walked; a large one is mostly text.
    if (len(body) > _LARGE_BYTES or body.count(b"[") + body.count(b"{") > MAX_DEPTH) and too_deep(fields):
        raise _too_deep()
    if not isinstance(fields, dict):
        raise BadRequest("The body is JSON but not an object.", hint="Send a JSON object.")
    return fields


def _not_json(body: bytes, error: Exception) -> BadRequest:
    """What is wrong with a body that cannot be read, where it is about characters: what the decoder says of these leads nowhere."""
    if body.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        return BadRequest("The body begins with a byte order mark.", hint="Send UTF-8 without one.")
    try:
        text = body.decode()
    except UnicodeDecodeError as wrong:
        return BadRequest(f"The body is not UTF-8: {wrong.reason} at byte {wrong.start}.", hint="Encode the body as UTF-8.")
    if lone := _LONE_HALF.search(text):
        at = len(text[: lone.start("half")].encode())
        return BadRequest(f"The body holds half of a surrogate pair at byte {at}.", hint="Escape the whole character, or write it as UTF-8.")
    if "\0" in text:
        return BadRequest(f"The body holds a NUL at byte {body.index(0)}.", hint="Encode the body as UTF-8.")
    return BadRequest(f"The body is not JSON: {error}.", hint="Send a JSON object.")


def _too_deep() -> BadRequest:
    return BadRequest(f"The body is nested more than {MAX_DEPTH} levels deep.", hint="Send a flatter JSON object.")


def check_fields(fields: dict[str, Any], known: Fields) -> None:
    """Raises BadRequest for an unknown name or a wrong type. null counts as left out."""
    absent = []
    for name, value in fields.items():
        kinds = known.get(name)
        if kinds is None:
            raise BadRequest(f"The field {name[:80]!r} is not known here.", hint=nearest(name, known), param=name[:80])
        if value is None:
            absent.append(name)
        elif not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise BadRequest(f"`{name}` must be {_say(kinds)}.", hint="docs/openai.md lists the fields and their types.", param=name)
    for name in absent:
        del fields[name]


def _say(kinds: tuple[type, ...]) -> str:
    return " or ".join(_NAMES[kind] for kind in kinds if not (kind is int and float in kinds))


def check_messages(messages: Any) -> None:
    """Raises BadRequest that names the message that is wrong."""
    if not messages:
        raise BadRequest("`messages` is missing or empty.", hint="Send at least one message.", param="messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise BadRequest(f"`{where}` must be an object.", hint='For example {"role": "user", "content": "Hello"}.', param=where)
        if not message.keys() <= _MESSAGE:
            name = sorted(message.keys() - _MESSAGE)[0]
            raise BadRequest(f"`{where}` has an unknown field {name[:80]!r}.", hint=nearest(name, _MESSAGE), param=where)
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise BadRequest(f"`{where}.role` is not a known role.", hint="Known: " + ", ".join(sorted(_ROLES)) + ".", param=f"{where}.role")
        content = message.get("content")
        if isinstance(content, str):
            continue
        if isinstance(content, list):
            if content and all(_is_part(part) for part in content):
                continue
        elif content is None and (_is_list_of(message.get("tool_calls"), dict) or message.get("function_call") or message.get("refusal")):
            continue
        raise BadRequest(
            f"`{where}.content` must be text or a list of parts.", hint='A part is {"type": "text", "text": "..."}.', param=f"{where}.content"
        )


def _is_part(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("type"), str) and (part["type"] != "text" or isinstance(part.get("text"), str))


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, kind) for item in value)


def check_lists(fields: dict[str, Any]) -> None:
    """Raises BadRequest for a list that holds what engines choke on."""
    for name, kind, what in (("tools", dict, "objects"), ("functions", dict, "objects"), ("stop", str, "texts"), ("stop_token_ids", int, "numbers")):
        value = fields.get(name)
        if isinstance(value, list) and not all(isinstance(item, kind) for item in value):
            raise BadRequest(f"`{name}` must be a list of {what}.", hint="docs/openai.md lists the fields and their types.", param=name)
    if isinstance(stop := fields.get("stop"), list) and "" in stop:
        raise BadRequest("`stop` holds an empty text, at which every answer would end before it began.", hint="Leave it out.", param="stop")


def stream_options(fields: dict[str, Any], streams: bool) -> ShowsUsage:
    """When the caller wants to be told the tokens of its stream; takes our own option out, which no engine knows. Raises BadRequest."""
    options = fields.get("stream_options")
    if not options:
        return "never"
    for name in ("include_usage", CONTINUOUS_USAGE):
        if not isinstance(options.get(name), bool | None):
            where = f"stream_options.{name}"
            raise BadRequest(f"`{where}` must be true or false.", hint="Leave it out for false.", param=where)
    if CONTINUOUS_USAGE in options:
        fields["stream_options"] = {name: value for name, value in options.items() if name != CONTINUOUS_USAGE}
        if options[CONTINUOUS_USAGE]:
            if not streams:
                raise BadRequest(
                    "`stream_options.continuous_usage` is for streams.", hint="Add `stream`: true; a whole answer always tells its usage.",
                    param="stream_options.continuous_usage",
                )  # fmt: skip
            return "always"
    return "last" if options.get("include_usage") else "never"


def check_prompt(prompt: Any) -> None:
    """Raises BadRequest unless the prompt is one text or one list of token ids."""
    if isinstance(prompt, str) and prompt:
        return
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str) and prompt[0]:
        return
    raise BadRequest("`prompt` must be one text or one list of token ids.", hint="Send several prompts in several requests.", param="prompt")
