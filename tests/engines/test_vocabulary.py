"""Vocabularies out of GGUF files: llama.cpp's own test vectors, the tokens that end an answer, and files that are broken."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.core.errors import BadRequest
from tidegate.engines.gguf import read_header
from tidegate.engines.vocabulary import Vocabulary, read_vectors, read_vocabulary

VOCABULARIES = Path(__file__).parents[3] / "shared" / "data" / "tokenizers" / "gguf_vocab"
needs_data = pytest.mark.skipif(not VOCABULARIES.is_dir(), reason="no ../shared/data beside this checkout")


def gguf(**pairs: Any) -> bytes:
    """A GGUF file of strings, unsigned numbers and lists of them. `__` in a name stands for a dot."""
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    body = b""
    for name, value in pairs.items():
        body += text(name.replace("__", "."))
        if isinstance(value, str):
            body += struct.pack("<I", 8) + text(value)
        elif isinstance(value, int):
            body += struct.pack("<II", 4, value)
        elif isinstance(value[0], str):
            body += struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        else:
            code = "f" if isinstance(value[0], float) else "i"
            body += struct.pack(f"<IIQ{len(value)}{code}", 9, 6 if code == "f" else 5, len(value), *value)
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + body


def spm(**more: Any) -> bytes:
    tokens = ["<unk>", "<s>", "</s>", "<|end|>", "▁", "a", "b", "ab", "▁ab"] + [f"<0x{byte:02X}>" for byte in range(256)]
    return gguf(
        general__architecture="toy", toy__context_length=64, tokenizer__ggml__model="llama", tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__scores=[0.0] * 4 + [-3.0, -4.0, -5.0, -1.0, -2.0] + [0.0] * 256,
        tokenizer__ggml__token_type=[2, 3, 3, 3, 1, 1, 1, 1, 1] + [6] * 256, tokenizer__ggml__eos_token_id=2, **more,
    )  # fmt: skip


def written(folder: Path, data: bytes, name: str = "toy.gguf") -> Path:
    file = folder / name
    file.write_bytes(data)
    return file


@needs_data
@pytest.mark.parametrize("family", ["gpt-2", "phi-3", "qwen2"])
def test_the_vectors_of_real_vocabularies(family: str) -> None:
    """Every text of llama.cpp's test vectors becomes exactly the ids that llama.cpp makes of it."""
    file = VOCABULARIES / f"ggml-vocab-{family}.gguf.gz"
    vocabulary, vectors = read_vocabulary(file), read_vectors(file)
    assert len(vectors) == 46
    assert [text for text, ids in vectors if vocabulary.encode(text) != ids] == []


@needs_data
@pytest.mark.parametrize(
    ("family", "eos", "template_end"),
    [("gpt-2", "<|endoftext|>", None), ("phi-3", "<|endoftext|>", "<|end|>"), ("qwen2", "<|endoftext|>", "<|im_end|>")],
)
def test_a_template_may_end_with_another_token_than_the_vocabulary_says(family: str, eos: str, template_end: str | None) -> None:
    """Of three real families two say one end of sequence and end their answers with another."""
    vocabulary = read_vocabulary(VOCABULARIES / f"ggml-vocab-{family}.gguf.gz")
    assert vocabulary.eos_id == vocabulary.id_of(eos)
    assert vocabulary.template_end_id == (vocabulary.id_of(template_end) if template_end else None)


def test_control_tokens_in_a_text_stay_text(tmp_path: Path) -> None:
    """What a user types is never a control token, however it looks."""
    vocabulary = read_vocabulary(written(tmp_path, spm()))
    assert vocabulary.encode("</s>") == [4, *(9 + byte for byte in b"</s>")]
    assert vocabulary.encode("ab") == [8]
    assert vocabulary.control == ["<s>", "</s>", "<|end|>"]


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        ("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}", [2, 3]),
        ("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", [2]),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", [2]),
        ("{{ ''.__class__.__mro__ }}", [2]),
        ("{{ raise_exception('no') }}", [2]),
        ("{% broken", [2]),
    ],
)
def test_the_ids_that_end_an_answer(tmp_path: Path, template: str, ends: list[int]) -> None:
    """EOS first, then what the template puts behind an answer; a template that is hostile or broken tells nothing."""
    assert read_vocabulary(written(tmp_path, spm(tokenizer__chat_template=template))).end_ids == ends


def test_a_vocabulary_that_cannot_be_computed_says_why(tmp_path: Path) -> None:
    """Another family's rules are not guessed."""
    odd = gguf(tokenizer__ggml__model="gpt2", tokenizer__ggml__pre="odd", tokenizer__ggml__tokens=["a", "b", "ab"], tokenizer__ggml__merges=["a b"])
    vocabulary = read_vocabulary(written(tmp_path, odd))
    assert vocabulary.why_not == "the splitting rules 'odd' are not among those that Tidegate knows"
    with pytest.raises(BadRequest, match="odd"):
        vocabulary.encode("ab")
    with pytest.raises(BadRequest, match="no vocabulary"):
        Vocabulary({"general.architecture": "toy"})


def test_a_gzipped_file_is_read_like_a_plain_one(tmp_path: Path) -> None:
    """Vocabularies are shipped packed."""
    assert read_header(written(tmp_path, gzip.compress(spm()), "toy.gguf.gz")) == read_header(written(tmp_path, spm()))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "in the middle"), (b"PK\3\4" + b"x" * 40, "does not begin"), (spm()[:200], "in the middle"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version is 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "claims"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 60), "would be"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 0, 1 << 60), "items"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77), "unknown type 77"),
    ],
)  # fmt: skip
def test_broken_and_hostile_files_are_refused(tmp_path: Path, data: bytes, why: str) -> None:
    """Sizes in a file are claims: no claim makes room before its bytes are there."""
    with pytest.raises(BadRequest, match=why):
        read_header(written(tmp_path, data))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """The error names it."""
    with pytest.raises(BadRequest, match=r"nowhere\.gguf cannot be read"):
        read_header(tmp_path / "nowhere.gguf")


@settings(max_examples=60)
@given(st.text(max_size=60))
def test_no_text_is_lost(text: str) -> None:
    """The ids of any text, put together again, are the text."""
    vocabulary = Vocabulary({
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["▁", "a", "b", "ab", *(f"<0x{byte:02X}>" for byte in range(256))],
        "tokenizer.ggml.scores": [-1.0] * 260, "tokenizer.ggml.token_type": [1] * 4 + [6] * 256, "tokenizer.ggml.add_space_prefix": False,
    })
    said = b"".join(
        bytes([number - 4]) if number >= 4 else vocabulary.tokens[number].replace("▁", " ").encode() for number in vocabulary.encode(text)
    )
    assert said.decode("utf-8", "replace") == text.encode("utf-8", "replace").decode().replace("▁", " ")
