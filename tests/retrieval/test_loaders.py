"""What each loader makes of good, odd, broken and hostile files."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.errors import DocumentUnreadable
from tidegate.core.plugins import load as load_plugin
from tidegate.core.plugins import names
from tidegate.retrieval import encoding, magic
from tidegate.retrieval.load_child import SOCKET, by_suffix, read
from tidegate.retrieval.loaded import Block, Bounds, Loaded
from tidegate.retrieval.loaders import md, txt

Write = Callable[[str, str | bytes], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to_file(name: str, content: str | bytes) -> str:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return to_file


def load_md(write: Write, text: str) -> Loaded:
    return md.load(write("a.md", text), Bounds())


# -- every loader


@pytest.mark.parametrize("name", names(SOCKET))
def test_a_loader_names_its_suffixes_and_has_load(name: str) -> None:
    """Every file in the folder is a loader, and no two claim one suffix."""
    module = load_plugin(SOCKET, name)
    assert module.SUFFIXES
    assert all(by_suffix()[suffix] is module.load for suffix in module.SUFFIXES)


@pytest.mark.parametrize("suffix", sorted(by_suffix()))
@given(content=st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(suffix: str, content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever a file holds, the reader gives blocks or says why not; it never raises."""
    path = tmp_path_factory.getbasetemp() / f"fuzz{suffix}"
    path.write_bytes(content)
    outcome = read(by_suffix(), str(path), Bounds())
    assert (outcome.loaded is None) == (outcome.failure == "unreadable")
    assert outcome.loaded or outcome.message


def test_a_suffix_without_loader_is_refused_by_name(write: Write) -> None:
    """A .odt is refused, and the known suffixes are listed."""
    outcome = read(by_suffix(), write("a.odt", "text"), Bounds())
    assert ".odt" in outcome.message
    assert ".pdf" in (outcome.hint or "")


def test_headings_alone_are_no_document(write: Write) -> None:
    """A document of headings only has nothing that can be quoted."""
    assert "no text but headings" in read(by_suffix(), write("a.md", "# One\n\n## Two\n"), Bounds()).message


@pytest.mark.parametrize("title", ["Appendix A: Rates", "5. Annex", "附录一 费率表", "附件：健康告知"])
def test_an_appendix_is_marked(write: Write, title: str) -> None:
    """Whatever the format: what stands below a heading that calls itself an appendix is one, up to the next heading beside it."""
    outcome = read(by_suffix(), write("a.md", f"# T\n\ntext\n\n## {title}\n\nrates\n\n### Below\n\nmore\n\n## Complaints\n\nto us\n"), Bounds())
    assert outcome.loaded is not None
    assert [block.text for block in outcome.loaded.blocks if block.part == "appendix"] == [title, "rates", "Below", "more"]


# -- names and contents


@pytest.mark.parametrize(
    ("head", "suffix", "said"),
    [
        (b"\xff\xd8\xff\xe0", ".pdf", "a JPEG picture, named .pdf"),
        (b"\x89PNG\r\n\x1a\n", ".pdf", "a PNG picture"),
        (b"PK\x03\x04", ".pdf", "Office"),
        (b"hello", ".pdf", "no %PDF- header"),
        (b"%PDF-1.7", ".txt", "a PDF, named .txt"),
        (b"\xff\xd8\xff\xe0", ".md", "a JPEG picture, named .md"),
        (b"ab\0cd", ".txt", "NUL bytes"),
        (b"", ".md", "empty"),
    ],
)
def test_a_file_is_what_its_first_bytes_say(head: bytes, suffix: str, said: str) -> None:
    """A renamed file is refused with what it really is."""
    with pytest.raises(DocumentUnreadable, match=said):
        magic.check(head, suffix)


@pytest.mark.parametrize(
    ("head", "suffix"), [(b"junk\n%PDF-1.4", ".pdf"), ("港湾".encode(), ".md"), (codecs.BOM_UTF16_LE + b"a\0", ".txt")]
)
def test_a_right_name_passes(head: bytes, suffix: str) -> None:
    """Leading junk before a PDF header, and UTF-16 with its mark, are no reason to refuse."""
    magic.check(head, suffix)


# -- encodings

CHINESE = "港湾互助保险：理赔须在 14 天内申请。"


@pytest.mark.parametrize("name", ["utf-8", "utf-8-sig", "utf-16", "gb18030"])
def test_chinese_text_is_read_in_its_usual_encodings(name: str) -> None:
    """UTF-8 with and without a mark, UTF-16 with one, and GB18030 give the same text."""
    assert encoding.decode(CHINESE.encode(name)) == CHINESE


def test_latin1_is_refused_with_the_way_out() -> None:
    """Bytes that are neither UTF-8 nor plausible Chinese are not guessed at."""
    with pytest.raises(DocumentUnreadable, match="neither UTF-8") as caught:
        encoding.decode("Prämie für die Küstenhäuser, fällig im März; café, naïve, déjà vu".encode("latin-1"))
    assert "iconv" in (caught.value.hint or "")


@given(st.text())
def test_utf8_is_always_read(text: str) -> None:
    """Any UTF-8 text comes back, line ends made one."""
    data = text.encode()
    if not data.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        assert encoding.decode(data) == text.replace("\r\n", "\n").replace("\r", "\n")


# -- plain text


def test_blank_lines_part_paragraphs(write: Write) -> None:
    """Text has paragraphs and no headings."""
    loaded = txt.load(write("notes.txt", "one\nstill one\n\n\ntwo\n"), Bounds())
    assert loaded == Loaded("notes", [Block("one\nstill one"), Block("two")])


# -- Markdown


def test_front_matter_gives_title_and_tags(write: Write) -> None:
    """Title and tags come from between the --- lines; other keys are noted, not dropped in silence."""
    loaded = load_md(write, '---\ntitle: "Motor cover"\ntags:\n  product: motor\nauthor: Ann\n---\n# H\n\ntext\n')
    assert (loaded.title, loaded.tags) == ("Motor cover", {"product": "motor"})
    assert loaded.blocks == [Block("H", "heading", 1), Block("text")]
    assert [note for note in loaded.notes if "author: Ann" in note]


def test_an_unclosed_front_matter_is_text(write: Write) -> None:
    """A --- without its end is a rule, and what follows is kept."""
    assert Block("text") in load_md(write, "---\ntext\n").blocks


def test_the_first_heading_is_the_title(write: Write) -> None:
    """Without front matter the first heading names the document, else the file does."""
    assert load_md(write, "# Claims\n\ntext").title == "Claims"
    assert load_md(write, "text").title == "a"


def test_markup_goes_and_meaning_stays(write: Write) -> None:
    """Emphasis goes; link targets, picture texts, code and list marks stay; Chinese lines are joined without a space."""
    loaded = load_md(
        write,
        "A **bold** [form](https://x.example/f) ![chart](c.png)\nnext\n\n港湾\n互助\n\n"
        "- one\n  - two\n\n3. x\n4. y\n\n```\na = 1\n```\n\n> said\n",
    )
    assert [block.text for block in loaded.blocks] == [
        "A bold form (https://x.example/f) chart next", "港湾互助", "- one\n  - two", "3. x\n4. y", "a = 1", "said",
    ]


def test_a_break_in_markup_parts_words(write: Write) -> None:
    """`<br>` stands for a space, in texts and in cells; other markup inside a line for nothing."""
    blocks = load_md(write, "one<br>two<BR/>th<b>r</b>ee\n\n| a | b |\n|---|---|\n| 1<br>2 | 3 |\n").blocks
    assert [block.text for block in blocks] == ["one two three", "| a | b |\n|---|---|\n| 1 2 | 3 |"]


def test_a_table_stays_a_table(write: Write) -> None:
    """A table is a block of its own kind, a bar inside a cell escaped."""
    loaded = load_md(write, "| a | b |\n|---|:-:|\n| 1 | 2 \\| 3 |\n")
    assert loaded.blocks == [Block("| a | b |\n|---|---|\n| 1 | 2 \\| 3 |", "table")]


def test_html_is_noted(write: Write) -> None:
    """An HTML block is left out, and a note says so; a comment is nobody's text."""
    loaded = load_md(write, "text\n\n<div>hidden</div>\n\n<!-- a comment -->\n")
    assert loaded.blocks == [Block("text")]
    assert ["HTML block" in note for note in loaded.notes] == [True]
