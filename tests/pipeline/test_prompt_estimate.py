"""About how many tokens a prompt has, before any engine is asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tidegate.core.ask import EngineCall
from tidegate.engines.vocabulary import read_vocabulary
from tidegate.pipeline.stages.generate import estimate_prompt_tokens

ROOT = Path(__file__).parents[2]
VOCABULARY = ROOT.parent / "shared" / "data" / "tokenizers" / "gguf_vocab" / "ggml-vocab-qwen2.gguf.gz"
#: What the SDK sends beside the messages.
BESIDE = {"model": "smollm2-135m-instruct", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 64, "temperature": 0.2}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather", "description": "The weather of today in a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string", "description": "City and state, e.g. Bern, BE"}}},
    },
}  # fmt: skip


def estimated(fields: dict[str, Any], *, escaped: bool = False) -> int:
    """Of a body as a client sends it."""
    raw = json.dumps({**BESIDE, **fields}, ensure_ascii=escaped).encode()
    return estimate_prompt_tokens(EngineCall("completion" if "prompt" in fields else "chat", "m", fields, raw))


def chat(*texts: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]



def page(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


#: A body, and by how much of the true count the estimate may be off.
BODIES: dict[str, tuple[dict[str, Any], float]] = {
    "one line": ({"messages": chat("Say hello in one sentence.")}, 0.25),
    "a conversation": ({"messages": chat(*(page("README.md")[at : at + 400] for at in range(0, 4000, 400)))}, 0.25),
    "a document": ({"messages": chat(page("README.md")[:8000])}, 0.25),
    "code": ({"messages": chat(page("src/tidegate/admission/gate.py")[:12_000])}, 0.25),
    "Chinese": ({"messages": chat("如果理赔申请被拒绝，我应该在多少天之内提出申诉？请说明需要准备哪些材料，以及在哪里提交。" * 10)}, 0.5),
    "tools": ({"messages": chat("Will it rain in Bern?"), "tools": [TOOL] * 3}, 0.25),
    "a plain prompt": ({"prompt": page("README.md")[:4000]}, 0.25),
}


@pytest.mark.parametrize("name", BODIES)
def test_it_is_near_what_a_vocabulary_counts(name: str) -> None:
    """The texts as Qwen2's tokenizer counts them, with five tokens around each message and three around all, as in its template."""
    if not VOCABULARY.is_file():
        pytest.skip("the data of the tests is not here: ../shared/data")
    fields, off = BODIES[name]
    messages = fields.get("messages", [])
    texts = [message["content"] for message in messages] or [fields["prompt"]]
    texts += [json.dumps(fields["tools"], separators=(",", ":"))] if "tools" in fields else []
    vocabulary = read_vocabulary(VOCABULARY)
    true = sum(len(vocabulary.encode(text)) for text in texts) + (5 * len(messages) + 3 if messages else 0)
    assert abs(estimated(fields) - true) <= off * true + 2


def test_what_is_no_prompt_counts_nothing() -> None:
    """Neither the fields beside it, nor how its JSON spells a character, nor whether the body is forwarded as it came."""
    fields = {"messages": chat("你好，世界", "hello")}
    bare = estimate_prompt_tokens(EngineCall("chat", "m", fields))
    assert estimated(fields) == estimated(fields, escaped=True) == bare


def test_token_ids_are_counted() -> None:
    """One each."""
    assert estimated({"prompt": list(range(100_000, 100_040))}) in (40, 41)


def test_a_picture_is_not_text() -> None:
    """A megabyte of base64 is no quarter of a million tokens, and not nothing."""
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_000_000}}]
    assert 500 <= estimated({"messages": [{"role": "user", "content": parts}]}) <= 2000


def test_calls_of_tools_count() -> None:
    """Their arguments are part of what the model reads."""
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": json.dumps({"place": "Bern " * 100})}}
    with_call = [*chat("Rain?"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert estimated({"messages": with_call}) - estimated({"messages": chat("Rain?")}) >= 120
