"""Terms in a stream: what is found, where, how little is held, and that it never depends on how the text was cut into pieces."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tidegate.core.errors import SettingsError
from tidegate.guard.normal import MOST_UNSEEN, look_up
from tidegate.guard.terms import Hit, Scan, TermList, Terms, normal_form
from tidegate.guard.terms_file import read_terms

TERMS = ["bomb", "bombs away", "état", "schön", "炸弹", "弹药库", "c++", "한글", "foo bar", "ab", "abcab", "x\u0323\u0301y", "ﬁne", "αι", "กข"]
WORDS = Terms([TermList(TERMS)])
ANYWHERE = Terms([TermList(TERMS, whole_words=False)])
EXACT = Terms([TermList(["[[x]]", "x]", "\n\n"], whole_words=False)], exact=True)
#: Characters that meet every rule: the terms' own, look-alikes, marks, what cannot be seen, blanks, jamo, ligatures, expansions.
ALPHABET = (
    "bomsaway etcschnfurixy+-_.[]BOM\n\t\u00a0\u3000炸弹药库한글하\u1112\u1161\u11ab\u11a8ﬁﬀßİαι\u0345ᾳกข\u0e31"
    "\u0301\u0308\u0323\u0336\u0307\u200b\u200d\u00ad\ufe0f\x00оаьё\u0435\u0308ＢｏㇺéÉöＡ㎏ｶﾞ\uff9e\u0bc6\u0bbe\U0001f4a3*~"
)
PLAIN = "bomswayab  _-,.1+c\x7f\u0301"
texts = (
    st.text(alphabet=ALPHABET, max_size=24)
    | st.text(alphabet=PLAIN, max_size=24)
    | st.lists(
        st.sampled_from(
            [
                *TERMS,
                "b\u200bomb",
                "BOMB",
                "e\u0301tat",
                "bоmb",
                "foo \n\u00a0bar",
                "b o m b",
                "b-o*m.b",
                "bo**mb",
                "fo_o ba`r",
                "a b c a b",
                "炸**弹",
                "弹 药 库",
                " ",
                "*",
                "x",
                "\u0301",
                "\u0323",
            ]
        ),
        max_size=6,
    ).map("".join)
)
WHOLE = Terms([TermList(TERMS)], parted=False)
compiled = st.sampled_from([WORDS, ANYWHERE, EXACT, WHOLE])


def pieces(text: str, cuts: Sequence[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


def verdict(terms: Terms, given: Sequence[str]) -> tuple[Hit | None, list[tuple[int, int]]]:
    """The hit, and how many characters were free after each piece."""
    scan, fed, free = Scan(terms), 0, []
    for piece in given:
        hit = scan.feed(piece)
        fed += len(piece)
        free.append((fed, scan.free))
        if hit is not None:
            return hit, free
    return scan.finish(), free


def found(terms: Terms, text: str) -> str | None:
    hit, _ = verdict(terms, [text])
    return None if hit is None else text[hit.start : hit.end]


@given(text=texts, cuts=st.lists(st.integers(0, 200), max_size=8), terms=compiled)
@example(text="x\u0323\u0301y", cuts=[2, 3], terms=WORDS)
@example(text="x\u0301\u0323y", cuts=[1, 2], terms=WORDS)
@example(text="α\u0345", cuts=[1], terms=ANYWHERE)
@settings(max_examples=1500, deadline=None)
def test_the_verdict_is_the_same_for_every_chunking(text: str, cuts: list[int], terms: Terms) -> None:
    """The same hit at the same place, and at every point the same is free, whatever the pieces were."""
    hit, free = verdict(terms, pieces(text, cuts))
    one_by_one, free_then = verdict(terms, list(text))
    assert hit == one_by_one
    known = dict(free_then)
    for fed, at in free:
        if hit is None or at < hit.start:
            assert known.get(fed, at) == at


@given(texts=st.lists(texts, min_size=1, max_size=3), cuts=st.lists(st.integers(0, 200), max_size=12), terms=compiled)
@settings(max_examples=1500, deadline=None)
def test_what_was_learned_of_a_piece_is_true_elsewhere(texts: list[str], cuts: list[int], terms: Terms) -> None:
    """With what other texts taught, hit and free are those of the long way."""
    for text in [*texts, "".join(texts)]:
        scan, exact = Scan(terms), Scan(terms)
        for piece in pieces(text, cuts):
            hit = scan.feed(piece)
            assert hit == exact.feed_exactly(piece)
            assert scan.free == exact.free
            if hit is not None:
                break
        else:
            assert (scan.finish(), scan.free) == (exact.finish(), exact.free)


@pytest.mark.parametrize("piece", ["\u0301t", "\u200b\u0301t"])
def test_a_piece_that_begins_with_a_mark_is_looked_at_each_time(piece: str) -> None:
    """What it comes to hangs on the letter before it."""
    terms = Terms([TermList(["état"])])
    assert verdict(terms, ["q", piece, " "])[0] is None
    assert verdict(terms, ["e", piece, "at"])[0] is not None


def test_what_is_learned_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that never end leave no more behind than the bound."""
    monkeypatch.setattr("tidegate.guard.terms.MOST_STEPS", 20)
    terms = Terms([TermList(["bomb"])])
    scan = Scan(terms)
    for number in range(200):
        scan.feed(f" n{number}")
        assert sum(map(len, terms.steps)) <= 20
    scan.feed(" bom")
    assert scan.feed("b ") == Hit(len("".join(f" n{n}" for n in range(200))) + 1, scan._fed - 1, 0)


@given(text=texts, terms=compiled)
@settings(max_examples=800, deadline=None)
def test_what_is_free_never_reaches_into_a_hit(text: str, terms: Terms) -> None:
    """Nothing of a term is free before it is found, and what was free stays free."""
    hit, free = verdict(terms, list(text))
    places = [at for _, at in free]
    assert places == sorted(places)
    assert all(at <= fed for fed, at in free)
    if hit is not None:
        assert all(at <= hit.start for at in places)


@given(before=texts, after=texts, term=st.sampled_from(TERMS))
@settings(max_examples=500, deadline=None)
def test_a_term_anywhere_is_found(before: str, after: str, term: str) -> None:
    """Where places between words do not matter, a text that holds a term is never let through."""
    text = f"{before}.{term}.{after}"
    hit, _ = verdict(ANYWHERE, list(text))
    assert hit is not None
    assert hit.start <= len(before) + 1


@pytest.mark.parametrize(
    "text",
    [
        "bomb", "BOMB", "Bomb!", "ＢＯＭＢ", "b\u200bomb", "b\u00ado\u00admb", "bоmb", "вomb", "b\u0336o\u0336m\u0336b\u0336", "做bomb的", "(bomb)",
        "bomb\u0000s", "𝐛𝐨𝐦𝐛", "ⓑⓞⓜⓑ", "foo  bar", "foo\nbar", "foo\u00a0bar", "e\u0301tat", "ÉTAT", "做炸弹", "한글은", "C++",
        "_bomb_", "bomb_", "bomb_s", "a__bomb", "é_bomb_é", "_état_", "a long piece, all in ASCII, with a _bomb_ in it",
    ],
)  # fmt: skip
def test_it_is_found_as_a_reader_sees_it(text: str) -> None:
    """Case, width, unseen characters, look-alikes, marks laid over, blanks of any kind, composed or not: the same term."""
    assert (found(WORDS, text) is not None) == (text != "bomb\u0000s")


@pytest.mark.parametrize("text", ["bombs", "abomb", "bombs_", "etat", "schon", "bömb", "foobar", "abc", "하글", "ca b", "ébomb", "bombe\u0301"])
def test_what_only_holds_the_letters_passes(text: str) -> None:
    """Part of a longer word, another letter, half a syllable: not the term."""
    assert found(WORDS, text) is None


def test_a_hit_says_where_it_is_in_the_text_as_it_came() -> None:
    """The place counts the caller's characters, not those of the normal form."""
    text = "ﬁ\u200b\u200b ß  so b\u200bo\u0336mb!"
    hit, _ = verdict(WORDS, list(text))
    assert hit is not None
    assert text[hit.start : hit.end] == "b\u200bo\u0336mb"
    assert hit.term == TERMS.index("bomb")


def test_only_a_live_prefix_is_held() -> None:
    """Text leaves as soon as it can begin no term any more; inside a word none begins."""
    scan = Scan(Terms([TermList(TERMS)], parted=False))
    for piece, free in [("a plan ", 7), ("b", 7), ("o", 7), ("x", 10), ("bom", 13), (" bombs", 14), (" a", 14), (" ", 22)]:
        scan.feed(piece)
        assert scan.free == free, piece


@pytest.mark.parametrize("filler", ["\u200b", " ", "\u0301", "\n", "\u0336"])
def test_what_is_held_is_bounded(filler: str) -> None:
    """Thousands of unseen characters, blanks or marks inside a term hold back no more than a bound."""
    scan = Scan(Terms([TermList(["foo bar"])]))
    scan.feed("foo ")
    for _ in range(5000):
        assert scan.feed(filler) is None
    assert 5004 - scan.free <= 4 + MOST_UNSEEN
    scan.feed_exactly("x")
    assert len(scan.window) < 300


def test_memory_does_not_grow_with_the_text() -> None:
    """A long text of every kind of character leaves no more behind than a short one."""
    scan = Scan(WORDS)
    for _ in range(300):
        scan.feed("ﬁ\u200b ü\u0308 x")
        scan.feed(" ü\u0308")
    assert len(scan.window) + len(scan._spans) < 100


@given(st.text(max_size=30))
@settings(max_examples=500, deadline=None)
def test_the_normal_form_covers_what_unicode_calls_the_same(text: str) -> None:
    """Canonically equal texts, and a text and its capitals' fold, have one normal form."""
    form = normal_form(text)
    assert normal_form(unicodedata.normalize("NFD", text)) == form
    assert normal_form(unicodedata.normalize("NFC", text)) == form


@pytest.mark.parametrize(("letter", "latin"), [*zip("аеорсухіАВЕКМНОРСТХαορνιΑΒΕΗΙΚΜΟΡΤΧı", "aeopcyxiabekmhopctxaopviabehikmoptxi", strict=True)])
def test_look_alikes_of_latin_letters(letter: str, latin: str) -> None:
    """A Cyrillic or Greek letter that looks like a Latin one is taken for it."""
    assert look_up(letter)[0] == latin


def test_the_same_term_in_two_lists_is_as_strict_as_the_stricter() -> None:
    """A list that counts anywhere wins over one of whole words."""
    both = Terms([TermList(["bomb"]), TermList(["bomb"], whole_words=False)])
    assert found(both, "abombs") == "bomb"
    assert found(Terms([TermList(["bomb"])]), "abombs") is None


def test_no_terms_find_nothing() -> None:
    """An empty list is a list."""
    assert verdict(Terms([]), ["a", "b"]) == (None, [(1, 1), (2, 2)])


def test_a_file_of_terms(tmp_path: Path) -> None:
    """One a line; comments, empty lines, blanks around and a byte order mark are passed over."""
    file = tmp_path / "terms.txt"
    file.write_bytes("\ufeff# ours\n\nbomb \r\n炸弹\n".encode())
    assert read_terms(file) == ["bomb", "炸弹"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"ok\n\xff\n", r":2: the terms file is not UTF-8"),
        ("ok\nfine\n\u200b\n".encode(), r":3: nothing is left"),
        (b"ok\n" + b"x" * 300, r":2: .*more than 200"),
        (b"# nothing\n", "holds no term"),
    ],
)
def test_what_is_no_term_is_refused_with_its_line(tmp_path: Path, content: bytes, says: str) -> None:
    """The error names file and line."""
    file = tmp_path / "terms.txt"
    file.write_bytes(content)
    with pytest.raises(SettingsError, match=says):
        read_terms(file)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """The path is in the message."""
    with pytest.raises(SettingsError, match="nowhere"):
        read_terms(tmp_path / "nowhere.txt")
