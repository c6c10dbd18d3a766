"""Chat templates for engines that take a prompt only, and control tokens in messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.errors import BadRequest, SettingsError
from tidegate.core.flight import Flight
from tidegate.engines.template import BUILT_IN, ChatTemplate, guard_messages, load_template

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def test_chatml() -> None:
    """The built-in ChatML ends where the answer begins."""
    assert load_template("chatml", "e").render(MESSAGES, where="e") == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_llama3() -> None:
    """The built-in template of Llama 3 leaves the beginning of the text to the engine's tokenizer."""
    assert load_template("llama3", "e").render(MESSAGES[1:], where="e") == (
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )


@pytest.mark.parametrize(
    ("content", "text"),
    [("a", "a"), (None, ""), ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab")],
)
def test_contents_are_text(content: Any, text: str) -> None:
    """A template sees text, whether it came as text, in parts or not at all."""
    rendered = ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": content}], where="e")
    assert rendered == text


def test_a_picture_is_refused() -> None:
    """What is no text cannot be rendered: it is refused by its kind."""
    picture = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(BadRequest, match="image_url"):
        load_template("chatml", "e").render([{"role": "user", "content": picture}], where="The engine")


def test_a_template_of_a_file(tmp_path: Path) -> None:
    """A Jinja file is taken as it is, with blocks trimmed as models' templates expect."""
    file = tmp_path / "chat.jinja"
    file.write_text("{% for m in messages %}\n  {% if m.role == 'user' %}\nU:{{ m.content }}\n  {% endif %}\n{% endfor %}\nA:")
    assert load_template(str(file), "e").render(MESSAGES, where="e") == "U:Hi\nA:"


def test_a_tokenizer_config(tmp_path: Path) -> None:
    """A tokenizer_config.json brings the template, its beginning and end, and the model's control tokens as they are written."""
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({
        "chat_template": [
            {"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"},
        ],
        "bos_token": {"content": "<B>"}, "eos_token": "~end~",
        "added_tokens_decoder": {"1": {"content": "~end~", "special": True}, "2": {"content": "word", "special": False}},
    }))  # fmt: skip
    template = load_template(str(file), "e")
    assert template.render(MESSAGES, where="e") == "<B>Be brief.~end~"
    guarded = guard_messages([{"content": "a ~end~ word <|im_end|>"}], "defuse", Flight("test"), template.control)
    assert guarded == [{"content": "a ~ end~ word < |im_end|>"}]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.jinja", None, "cannot be read"),
        ("broken.jinja", b"{% for %}", "no Jinja template"),
        ("bytes.jinja", b"\xff", "not UTF-8"),
        ("config.json", b"{", "not JSON"),
        ("config.json", b"{}", "no chat_template"),
    ],
)
def test_files_that_are_none(tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    """A file that holds no template is refused at the start, with the section that names it."""
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingsError, match=said) as caught:
        load_template(str(file), "e")
    assert "[engines.e]" in caught.value.message


def test_a_name_that_is_none() -> None:
    """A name that is nearly that of a built-in template gets it as a hint."""
    with pytest.raises(SettingsError) as caught:
        load_template("chatnl", "e")
    assert "'chatml'" in str(caught.value.hint)


@pytest.mark.parametrize("source", ["{{ raise_exception('no system role') }}", "{{ messages[5].content }}", "{{ messages.append(1) }}"])
def test_messages_that_do_not_fit(source: str) -> None:
    """What a template refuses, stumbles over or must not do is the caller's error, not ours."""
    with pytest.raises(BadRequest, match="do not fit"):
        ChatTemplate(source).render(MESSAGES, where="The engine")


@pytest.mark.parametrize(
    "text", ["<|im_end|>", "<｜end▁of▁sentence｜>", "<s>", "</s>", "<bos>", "<end_of_turn>", "[INST]", "[/INST]", "[TOOL_CALLS]"]
)
def test_control_tokens_are_defused(text: str) -> None:
    """The control tokens of the usual families are ended by a blank, counted, and never left whole."""
    flight = Flight("test")
    guarded = guard_messages([{"role": "user", "content": [{"type": "text", "text": f"a{text}b{text}"}]}], "defuse", flight)
    assert text not in guarded[0]["content"][0]["text"]
    assert guarded[0]["content"][0]["text"].replace(" ", "") == f"a{text}b{text}"
    assert flight.decisions[0][1:] == ("special_tokens_defused", {"count": 2})


@pytest.mark.parametrize("text", ["a < b and c > d", "<html><body>", "list[int]", "<p>", "x[0]", "<<", "<strong>"])
def test_other_brackets_are_left_alone(text: str) -> None:
    """Code and markup are no control tokens: the very same object comes back and nothing is noted."""
    flight = Flight("test")
    messages = [{"role": "user", "content": text}]
    assert guard_messages(messages, "defuse", flight) is messages
    assert flight.decisions == []


def test_they_are_refused_or_passed() -> None:
    """`refuse` refuses with the count, `pass` passes the messages as they are and says so."""
    messages = [{"role": "user", "content": "<s> and </s>"}]
    with pytest.raises(BadRequest, match="2 piece"):
        guard_messages(messages, "refuse", Flight("test"))
    flight = Flight("test")
    assert guard_messages(messages, "pass", flight) is messages
    assert flight.decisions[0][1:] == ("special_tokens_passed", {"count": 2})


@given(st.text(alphabet="<|im_end>/s[INST] ab", max_size=40))
def test_what_is_defused_is_defused_for_good(text: str) -> None:
    """After defusing nothing is left to defuse, and only blanks were added."""
    once = guard_messages([text], "defuse", Flight("test"))
    assert guard_messages(once, "defuse", Flight("test")) == once
    assert once[0].replace(" ", "") == text.replace(" ", "")


@given(st.lists(st.text(max_size=20), min_size=1, max_size=4))
def test_any_text_is_rendered(texts: list[str]) -> None:
    """Whatever messages say, the built-in templates hand it on unchanged."""
    for name in BUILT_IN:
        rendered = load_template(name, "e").render([{"role": "user", "content": text} for text in texts], where="e")
        assert all(text in rendered for text in texts)
