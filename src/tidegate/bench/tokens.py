"""The scripted engine's vocabulary: bytes, a few control tokens, and the words that it says; and its chat template, which is ChatML."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

WORDS = (
    " the", " quick", " brown", " fox", " jumps", " over", " lazy", " dogs",
    " and", " then", " café", " 你好", " runs", " off", " 😀", " far",
)  # fmt: skip
#: What it says in place of a word that may not come next.
OTHERS = (" other", " else", " instead")
CONTROL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<file_sep>", "</s>", "[INST]")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: Ids 0 to 255 are the bytes of UTF-8.
_PIECES = [bytes([byte]) for byte in range(256)] + [text.encode() for text in (*CONTROL, *WORDS, *OTHERS)]
_IDS = {piece: number for number, piece in enumerate(_PIECES)}
_WORD = b"|".join(re.escape(word.encode()) for word in sorted((*WORDS, *OTHERS), key=len, reverse=True))
_PLAIN = re.compile(b"(?s)" + _WORD + b"|.")
_SPECIAL = re.compile(b"(?s)" + b"|".join(re.escape(token.encode()) for token in CONTROL) + b"|" + _WORD + b"|.")
#: Where an answer begins.
ANSWER_MARK = [_IDS[b"<|im_start|>"], *b"assistant\n"]


def encode(text: str, *, special: bool) -> list[int]:
    """The ids of a text, which may hold parts of characters as `surrogateescape` writes them. `special`: control tokens in it are read as such."""
    try:
        data = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half a surrogate pair is no character
        data = text.encode("utf-8", "replace")
    return [_IDS[piece] for piece in (_SPECIAL if special else _PLAIN).findall(data)]


def decode(ids: Iterable[Any]) -> bytes:
    """The bytes of ids. Raises ValueError for what is no id of this vocabulary."""
    pieces = []
    for number in ids:
        if type(number) is not int or not 0 <= number < len(_PIECES):
            raise ValueError(f"The scripted engine's vocabulary has the ids 0 to {len(_PIECES) - 1}, not {str(number)[:40]}.")
        pieces.append(_PIECES[number])
    return b"".join(pieces)


def render(messages: Any, *, add_generation_prompt: bool = True) -> str:
    """ChatML, as TEMPLATE says it; text parts are put together."""
    told = [message for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []
    prompt = "".join(f"<|im_start|>{message.get('role')}\n{_content(message.get('content'))}<|im_end|>\n" for message in told)
    return prompt + ("<|im_start|>assistant\n" if add_generation_prompt else "")


def after_mark(ids: list[int]) -> int | None:
    """Where the last answer begins in a prompt's ids; None where there is no mark of one."""
    size = len(ANSWER_MARK)
    for at in range(len(ids) - size, -1, -1):
        if ids[at] == ANSWER_MARK[0] and ids[at : at + size] == ANSWER_MARK:
            return at + size
    return None


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part["text"]) for part in parts if isinstance(part, dict) and "text" in part)
