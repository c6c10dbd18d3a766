"""Chat templates: messages to a prompt, for engines that take a prompt only; and text in messages that reads as a control token."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tidegate.core.errors import BadRequest, SettingsError
from tidegate.core.flight import Flight
from tidegate.core.plugins import nearest

Policy = Literal["defuse", "refuse", "pass"]

#: Built-in templates. `content` is always text here.
BUILT_IN = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama3": (
        "{% for message in messages %}{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content + '<|eot_id|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
}

#: What tokenizers of the usual families read as a control token when it stands in a text. A blank after its first character ends that.
_CONTROL = re.compile(
    r"(?P<open><(?=[|｜][^<>|｜\s]{1,64}[|｜]>|/?s>|(?:bos|eos|pad|unk|mask|start_of_turn|end_of_turn)>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT)\]))"
)
#: Files of more bytes are no template.
_MOST_BYTES = 4 << 20


class ChatTemplate:
    """Renders messages as the model was trained to read them."""

    def __init__(self, source: str, *, bos: str = "", eos: str = "", control: Sequence[str] = ()) -> None:
        """`control`: the model's control tokens where they are known, beside those that are known by their look. Raises jinja2.TemplateError."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        self._template = environment.from_string(source)
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self.built_in = False  # then it does not write what a model wants before every prompt (its BOS)
        named = sorted({token for token in control if len(token) > 1}, key=len, reverse=True)
        self.control = re.compile(_CONTROL.pattern + "".join(f"|{_opening(token)}" for token in named)) if named else _CONTROL

    def render(self, messages: Sequence[dict[str, Any]], *, where: str) -> str:
        """The prompt, up to where the answer begins. Raises BadRequest where the messages do not fit the template."""
        try:
            return self._template.render(messages=[_plain(message, where) for message in messages], add_generation_prompt=True, **self._tokens)
        except (TemplateError, TypeError) as error:
            raise BadRequest(
                f"The messages do not fit the chat template of {where}: {str(error)[:300]}", hint="Check roles and their order.", param="messages"
            ) from None


def load_template(setting: str, engine: str) -> ChatTemplate:
    """The template that `chat_template` of [engines.NAME] names: built in, a Jinja file, or a tokenizer_config.json. Raises SettingsError."""
    where = f"chat_template of [engines.{engine}]"
    try:
        if setting in BUILT_IN:
            template = ChatTemplate(BUILT_IN[setting])
            template.built_in = True
            return template
        path = Path(setting)
        if not path.suffix and not path.exists():
            raise SettingsError(f"{where} is {setting!r}: no built-in template and no file.", hint=nearest(setting, BUILT_IN))
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise SettingsError(f"{where}: {setting!r} has more than {_MOST_BYTES} bytes.", hint="Name a Jinja template or a tokenizer_config.json.")
        return _from_config(data, where) if path.suffix == ".json" else ChatTemplate(data.decode())
    except OSError as error:
        raise SettingsError(f"{where} cannot be read: {setting!r} ({error.strerror or error}).", hint=nearest(setting, BUILT_IN)) from None
    except UnicodeDecodeError:
        raise SettingsError(f"{where}: {setting!r} is not UTF-8 text.", hint="Name a Jinja template or a tokenizer_config.json.") from None
    except TemplateError as error:
        raise SettingsError(f"{where}: {setting!r} is no Jinja template: {error}.", hint="Take the model's own chat_template.") from None


def guard_messages(messages: Any, policy: Policy, flight: Flight, control: re.Pattern[str] = _CONTROL) -> Any:
    """The messages with their control tokens treated as `policy` says; the same object where nothing had to be done.

    Notes `special_tokens_defused` or `special_tokens_passed` with the count. Raises BadRequest where they are to be refused.
    """
    count = 0

    def defuse(value: Any) -> Any:
        nonlocal count
        if isinstance(value, str):
            value, found = control.subn(lambda match: match[0][0] + " " + match[0][1:], value)
            count += found
            return value
        if isinstance(value, list):
            return [defuse(item) for item in value]
        if isinstance(value, dict):
            return {key: defuse(item) for key, item in value.items()}
        return value

    defused = defuse(messages)
    if not count:
        return messages
    if policy == "refuse":
        raise BadRequest(
            f"The messages hold {count} piece(s) of text that the model would read as control tokens.",
            hint="Leave them out, or set control_tokens of the engine to defuse.", param="messages",
        )  # fmt: skip
    flight.decide("special_tokens_defused" if policy == "defuse" else "special_tokens_passed", count=count)
    return defused if policy == "defuse" else messages


def text_of(content: Any, where: str) -> str:
    """The text of a message's content. Raises BadRequest where it holds something else, e.g. a picture."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = [part for part in content if isinstance(part, dict)]
    other = next((str(part.get("type"))[:40] for part in parts if part.get("type") != "text"), None)
    if other is not None:
        raise BadRequest(f"The chat template of {where} takes text only, not {other!r}.", hint="Send text parts.", param="messages")
    return "".join(part["text"] for part in parts)


def _plain(message: dict[str, Any], where: str) -> dict[str, Any]:
    return {**message, "content": text_of(message.get("content"), where)}


def _from_config(data: bytes, where: str) -> ChatTemplate:
    """From a model's tokenizer_config.json: its template, and its control tokens as they are written."""
    try:
        config = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise SettingsError(f"{where} is not JSON: {error}.", hint="Take the file from the model's folder.") from None
    source = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(source, list):  # several by name
        source = next((one.get("template") for one in source if isinstance(one, dict) and one.get("name") == "default"), None)
    if not isinstance(source, str):
        raise SettingsError(f"{where}: the file holds no chat_template.", hint="Newer models keep it in chat_template.jinja: name that file.")
    added = config.get("added_tokens_decoder")
    tokens = added.values() if isinstance(added, dict) else ()
    control = [str(token.get("content", "")) for token in tokens if isinstance(token, dict) and token.get("special")]
    return ChatTemplate(source, bos=_token(config.get("bos_token")), eos=_token(config.get("eos_token")), control=control)


def _token(value: Any) -> str:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


def _opening(token: str) -> str:
    """Matches the first character of a token where the rest of it follows."""
    return f"{re.escape(token[0])}(?={re.escape(token[1:])})"


def _raise(message: str) -> None:
    raise TemplateError(message)
