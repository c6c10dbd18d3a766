"""A model's vocabulary out of its GGUF file: text to token ids as the engine should make them, and the tokens that end an answer.

Two kinds are read: SentencePiece with scores (`llama`; Kudo and Richardson 2018) and byte-level BPE with ranked merges (`gpt2`; Sennrich et al.
2016, Radford et al. 2019), with the splitting rules of the families in `_SPLITS`. Special parsing is off: what a user typed is text.
"""

from __future__ import annotations

import functools
import heapq
import re
import sys
import unicodedata
from pathlib import Path
from typing import Any

from tidegate.core.errors import BadRequest
from tidegate.engines.gguf import read_header

#: `tokenizer.ggml.token_type`.
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6
#: What an answer looks like in a rendered template; the token behind it ends the answer.
_MARK = "TIDEGATE-ANSWER"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?{L}+| ?{N}+| ?[^\s{l}{n}]+|\s+(?!\S)|\s+"
_GPT4 = (
    r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n{l}{n}]?{L}+|{N}@| ?[^\s{l}{n}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: `tokenizer.ggml.pre` -> the patterns by which text is split before merging, each applied to what the one before it left. As in the families' own
#: tokenizer files: {L} and {N} are letters and numbers of Unicode, {l} and {n} the same within a class.
_SPLITS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,), "phi-2": (_GPT2,), "jina-es": (_GPT2,), "jina-de": (_GPT2,), "mpt": (_GPT2,), "olmo": (_GPT2,),
    "smollm": ("{N}", _GPT2), "starcoder": ("{N}", _GPT2), "refact": ("{N}", _GPT2), "command-r": ("{N}", _GPT2), "codeshell": ("{N}", _GPT2),
    "qwen2": (_GPT4.replace("@", ""),), "stablelm2": (_GPT4.replace("@", ""),), "deepseek-r1-qwen": (_GPT4.replace("@", ""),),
    "llama-bpe": (_GPT4.replace("@", "{1,3}"),), "llama3": (_GPT4.replace("@", "{1,3}"),), "llama-v3": (_GPT4.replace("@", "{1,3}"),),
    "dbrx": (_GPT4.replace("@", "{1,3}"),), "smaug-bpe": (_GPT4.replace("@", "{1,3}"),),
}  # fmt: skip


class Vocabulary:
    """The tokens of one model. `why_not` says why texts cannot be encoded here; empty where they can."""

    def __init__(self, header: dict[str, Any]) -> None:
        """`header`: as `gguf.read_header` gives it. Raises BadRequest where it holds no vocabulary."""
        self.architecture = str(header.get("general.architecture", "unknown"))
        self.name = str(header.get("general.name", ""))
        kind = header.get("tokenizer.ggml.model")
        tokens = header.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list) or not tokens or not isinstance(kind, str):
            raise BadRequest("The file holds no vocabulary (tokenizer.ggml.tokens).", hint="Name a model's GGUF file, or its vocabulary alone.")
        self.tokens: list[str] = tokens
        self.kind = kind
        self.pre = str(header.get("tokenizer.ggml.pre", "default"))
        types = header.get("tokenizer.ggml.token_type") or []
        self._types: list[int] = types if len(types) == len(tokens) else [1] * len(tokens)
        self.eos_id = _id(header.get("tokenizer.ggml.eos_token_id"), tokens)
        self.eot_id = _id(header.get("tokenizer.ggml.eot_token_id"), tokens)
        self.bos_id = _id(header.get("tokenizer.ggml.bos_token_id"), tokens)
        self.chat_template = str(header.get("tokenizer.chat_template") or "")
        context = header.get(f"{self.architecture}.context_length")
        self.context: int | None = context if isinstance(context, int) else None
        self._space_first = kind == "llama" and header.get("tokenizer.ggml.add_space_prefix") is not False
        self._ids = {token: number for number, token in reversed(list(enumerate(tokens)))}
        self._scores: list[float] = header.get("tokenizer.ggml.scores") or []
        merges = header.get("tokenizer.ggml.merges") or []
        self._ranks: dict[tuple[str, str], int] = {}
        for rank, merge in enumerate(merges):
            left, _, right = merge[1:].partition(" ")  # a left half may be a blank itself
            self._ranks.setdefault((merge[:1] + left, right), rank)
        own = sorted((t for t, kind_of in zip(tokens, self._types, strict=True) if kind_of == _USER_DEFINED and t), key=len, reverse=True)
        self._own = re.compile("|".join(map(re.escape, own))) if own else None
        self.why_not = self._reason()

    def _reason(self) -> str:
        if self.kind == "llama":
            return "" if len(self._scores) == len(self.tokens) else "it has no scores"
        if self.kind != "gpt2":
            return f"the tokenizer model {self.kind!r} is not one that Tidegate can compute (llama, gpt2)"
        if not self._ranks:
            return "it has no merges"
        return "" if self.pre in _SPLITS else f"the splitting rules {self.pre!r} are not among those that Tidegate knows"

    # -- the tokens that end an answer

    @property
    def control(self) -> list[str]:
        """The control tokens as text, in the order of their ids."""
        return [token for token, kind in zip(self.tokens, self._types, strict=True) if kind == _CONTROL]

    def id_of(self, token: str) -> int | None:
        """The id of exactly this token."""
        return self._ids.get(token)

    @functools.cached_property
    def template_end_id(self) -> int | None:
        """The id of the token that the chat template puts behind an answer; None where there is no template, or it puts none there."""
        if not self.chat_template:
            return None
        behind = _behind_an_answer(self.chat_template, self._text(self.bos_id), self._text(self.eos_id)).lstrip()
        found = [token for token in self._special() if token and behind.startswith(token)]
        return self._ids[max(found, key=len)] if found else None

    @property
    def end_ids(self) -> list[int]:
        """Every id that should end an answer: the vocabulary's EOS, its end of turn, and the template's end token. Each once."""
        return list(dict.fromkeys(i for i in (self.eos_id, self.eot_id, self.template_end_id) if i is not None))

    def _special(self) -> list[str]:
        return [token for token, kind in zip(self.tokens, self._types, strict=True) if kind in (_CONTROL, _USER_DEFINED)]

    def _text(self, token_id: int | None) -> str:
        return self.tokens[token_id] if token_id is not None else ""

    # -- text to ids

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, without BOS and EOS. Raises BadRequest where `why_not` has a reason."""
        if self.why_not:
            raise BadRequest(f"Texts cannot be encoded with this vocabulary: {self.why_not}.", hint="Ask the engine's own /tokenize.")
        ids: list[int] = []
        at = 0
        for own in self._own.finditer(text) if self._own else ():
            self._encode(text[at : own.start()], ids)
            ids.append(self._ids[own.group()])
            at = own.end()
        self._encode(text[at:], ids)
        return ids

    def _encode(self, text: str, ids: list[int]) -> None:
        if not text:
            return
        if self.kind == "llama":
            text = (" " if self._space_first else "") + text
            for piece in _merge(list(text.replace(" ", "▁")), self._score):
                self._pieces(piece, ids)
            return
        for word in _split(text, self.pre):
            letters = "".join(_BYTE_LETTERS[byte] for byte in word.encode("utf-8", "replace"))
            for piece in _merge(list(letters), self._rank):
                found = self._ids.get(piece)
                ids.extend([found] if found is not None else [self._ids[one] for one in piece if one in self._ids])

    def _score(self, left: str, right: str) -> float | None:
        found = self._ids.get(left + right)
        return -self._scores[found] if found is not None else None

    def _rank(self, left: str, right: str) -> float | None:
        return self._ranks.get((left, right))

    def _pieces(self, piece: str, ids: list[int]) -> None:
        """What is not in the vocabulary is spelled in bytes."""
        found = self._ids.get(piece)
        if found is not None:
            ids.append(found)
            return
        ids.extend(self._ids[name] for byte in piece.encode("utf-8", "replace") if (name := f"<0x{byte:02X}>") in self._ids)


def read_vocabulary(path: Path) -> Vocabulary:
    """The vocabulary of a GGUF file, plain or gzipped. Raises BadRequest."""
    return Vocabulary(read_header(path))


def _merge(symbols: list[str], cost: Any) -> list[str]:
    """Merge neighbours, the cheapest pair first and the leftmost of equals, until no pair has a cost."""
    after = list(range(1, len(symbols) + 1))
    before = list(range(-1, len(symbols) - 1))
    heap: list[tuple[float, int, int, str]] = []

    def offer(left: int, right: int) -> None:
        if left >= 0 and right < len(symbols):
            price = cost(symbols[left], symbols[right])
            if price is not None:
                heapq.heappush(heap, (price, left, right, symbols[left] + symbols[right]))

    for left in range(len(symbols) - 1):
        offer(left, left + 1)
    while heap:
        _, left, right, whole = heapq.heappop(heap)
        if after[left] != right or symbols[left] + symbols[right] != whole or not symbols[right]:
            continue  # one of the two has been merged since
        symbols[left], symbols[right] = whole, ""
        after[left] = after[right]
        if after[right] < len(symbols):
            before[after[right]] = left
        offer(before[left], left)
        offer(left, after[left])
    return [symbol for symbol in symbols if symbol]


def _split(text: str, pre: str) -> list[str]:
    words = [text]
    for pattern in _patterns(pre):
        words = [piece for word in words for piece in _cut(pattern, word)]
    return words


def _cut(pattern: re.Pattern[str], word: str) -> list[str]:
    pieces, at = [], 0
    for match in pattern.finditer(word):
        pieces += [word[at : match.start()], match.group()]
        at = match.end()
    return [piece for piece in (*pieces, word[at:]) if piece]


@functools.cache
def _patterns(pre: str) -> list[re.Pattern[str]]:
    letters, numbers = _classes()
    found = []
    for split in _SPLITS[pre]:
        written = split.replace("{L}", f"[{letters}]").replace("{N}", f"[{numbers}]").replace("{l}", letters).replace("{n}", numbers)
        found.append(re.compile(written))
    return found


@functools.cache
def _classes() -> tuple[str, str]:
    """The letters and the numbers of Unicode as ranges for a character class: `re` knows neither."""
    ranges: dict[str, list[list[int]]] = {"L": [], "N": []}
    for point in range(sys.maxunicode + 1):
        kind = unicodedata.category(chr(point))[0]
        if kind in ranges:
            if ranges[kind] and ranges[kind][-1][1] == point - 1:
                ranges[kind][-1][1] = point
            else:
                ranges[kind].append([point, point])
    written = {kind: "".join(f"{_escaped(a)}-{_escaped(b)}" for a, b in found) for kind, found in ranges.items()}
    return written["L"], written["N"]


def _escaped(point: int) -> str:
    return f"\\U{point:08x}"


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary: itself where it can be printed, else one above U+0100."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, shifted = [], 0
    for byte in range(256):
        letters.append(chr(byte) if byte in plain else chr(0x100 + shifted))
        shifted += byte not in plain
    return letters


_BYTE_LETTERS = _byte_letters()


def _behind_an_answer(template: str, bos: str, eos: str) -> str:
    """What a chat template writes behind an answer; empty where it cannot be rendered. The template is foreign: it runs in a sandbox."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(why: str) -> None:
        raise TemplateError(why)

    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _MARK}]
    room = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    try:
        written = room.from_string(template).render(
            messages=messages, bos_token=bos, eos_token=eos, add_generation_prompt=False, raise_exception=refuse
        )
    except Exception:  # noqa: BLE001 - a foreign template can fail in any way, and then it tells nothing
        return ""
    return written.rpartition(_MARK)[2] if _MARK in written else ""


def _id(value: Any, tokens: list[str]) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(tokens) else None


def read_vectors(folder_file: Path) -> list[tuple[str, list[int]]]:
    """llama.cpp's test vectors beside a vocabulary (`NAME.gguf.inp`, `NAME.gguf.out`): texts and their ids; [] where there are none."""
    stem = folder_file.name.removesuffix(".gz")
    texts, numbers = (folder_file.with_name(stem + end) for end in (".inp", ".out"))
    if not (texts.is_file() and numbers.is_file()):
        return []
    said = texts.read_text("utf-8", "replace").split("\n__ggml_vocab_test__\n")
    ids = [[int(one) for one in line.split()] for line in numbers.read_text("ascii").splitlines()]
    return list(zip(said, ids, strict=False))
