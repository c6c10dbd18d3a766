"""Terms whose letters are parted: what a reader takes for the word is found, what only runs together is not."""

from __future__ import annotations

import itertools
import re
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tidegate.guard.glance import Glance
from tidegate.guard.parted import LEAST_SPELLED, MOST_BETWEEN, may_be_parted
from tidegate.guard.road import Road
from tidegate.guard.terms import Hit, Scan, TermList, Terms

TERMS = ("ban", "banned", "ab", "abba", "ban nab", "c3b", "a", "nab bb", "内幕消息", "幕消")
LISTS = {whole: Terms([TermList(TERMS, whole_words=whole)]) for whole in (True, False)}
EMPHASIS = "*_~`"


def first_hit(terms: Terms, pieces: list[str]) -> Hit | None:
    scan = Scan(terms)
    for piece in pieces:
        if (hit := scan.feed(piece)) is not None:
            return hit
    return scan.finish()


def found(text: str, *, parted: bool = True) -> str | None:
    hit = first_hit(Terms([TermList(["banned", "guaranteed return", "usa", "ai", "内幕消息", "état"])], parted=parted), [text])
    return None if hit is None else text[hit.start : hit.end]


@pytest.mark.parametrize(
    "said",
    [
        "b a n n e d", "B A N N E D", "b.a.n.n.e.d", "b-a-n-n-e-d", "b - a - n - n - e - d", "b*a*n*n*e*d", "b\na\nn\nn\ne\nd", "b/a/n/n/e/d",
        "ban**ned**"[:8], "ban_ned", "b_a_n_n_e_d", "ba~~nn~~ed", "ba`nn`ed", "guar_anteed re**turn", "U.S.A", "u s a", "内 幕 消 息", "内**幕**消息",
        "é t a t", "e\u0301 t a t", "b\u200b a n\u200b n e d", "ｂ ａ ｎ ｎ ｅ ｄ", "ba*\u200b*nned",
    ],
)  # fmt: skip
def test_a_word_that_is_parted_is_found(said: str) -> None:
    """Spelled singly, with emphasis inside, in any script, among other words and at both ends; and the place is that of the text."""
    for before, after in (("", ""), ("so ", " it is"), ("I ", "."), ("(", ")")):
        assert found(before + said + after) == said
        assert found(before + said + after, parted=False) is None


@pytest.mark.parametrize(
    "said",
    [
        "ban ned", "a ban needs", "b anned", "bann ed", "I a m an ned", "b a nned", "ba n n e d", "ba--nned", "ban.ned", "ban-ned", "a i", "A. I.",
        "b    a    n n e dd", "xb a n n e d", "b a n n e dx", "b, a, n, n, e, d", "**ban** **ned**", "ban **ned**", "ban****ned", "国内 幕后消息",
        "内 幕消息", "内幕 消息", "u s ages", "b a n  (n e d)", "ban\u200b\nned",
    ],
)  # fmt: skip
def test_whole_words_never_run_together(said: str) -> None:
    """Blanks between words that are whole, signs inside a word, two letters alone, longer gaps, part of a longer word: not the term."""
    assert found(said) is None


@cache
def patterns(whole: bool) -> list[re.Pattern[str]]:
    """What the rules say, a term each: emphasis may stand between letters; or each letter alone with gaps between them."""
    before, after = ("(?<![a-z0-9])", "(?![a-z0-9])")
    made = []
    for term in TERMS:
        loose = re.sub(r"(?<=[^\W_])(?=[^\W_])", f"[{EMPHASIS}]{{0,{MOST_BETWEEN}}}", term)
        first, last = (before if whole and term[0].isascii() else ""), (after if whole and term[-1].isascii() else "")
        made.append(re.compile(first + loose + last))
        if term.isalnum() and len(term) >= LEAST_SPELLED:
            gap = f"[ .\\-/|+·{EMPHASIS}]{{1,{MOST_BETWEEN}}}"
            made.append(re.compile((before if term[0].isascii() else "") + gap.join(term) + (after if term[-1].isascii() else "")))
    return made


def by_the_rules(text: str, whole: bool) -> tuple[int, int] | None:
    """Where the hit is that ends first, and of those the longest. From a place each pattern matches in one way alone."""
    hits = [(match.end(), start) for one in patterns(whole) for start in range(len(text)) if (match := one.match(text, start))]
    return (min(hits)[1], min(hits)[0]) if hits else None


LETTERS = st.sampled_from("aaabbnedc3 .*_-~x内幕消息")
said = st.text(alphabet=LETTERS, max_size=14) | st.lists(
    st.sampled_from(["ban", "b a n", "n.e.d", "ban*ned", "b_a**nn_ed", "a b b a", " ", "*", "ban na_b", "内 幕", " 消 息", "内*幕"]), max_size=4
).map("".join)


@given(said, st.lists(st.integers(0, 60), max_size=6), st.booleans())
@example("a b b a", [1, 3], True)
@example("ban_ned", [3, 4], False)
@settings(max_examples=1500, deadline=None)
def test_the_verdict_is_what_the_rules_say_for_every_chunking(text: str, cuts: list[int], whole: bool) -> None:
    """The same hit as by patterns that say the rules one term at a time."""
    text = re.sub("  +", " ", text)
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    hit = first_hit(LISTS[whole], [text[a:b] for a, b in itertools.pairwise(places)])
    assert (hit and hit[:2]) == by_the_rules(text, whole)


@given(said, st.booleans())
@settings(max_examples=1000, deadline=None)
def test_the_first_look_passes_no_term(text: str, whole: bool) -> None:
    """A whole text that is cleared at once holds none."""
    terms = LISTS[whole]
    if terms.glance.clears(text):
        assert first_hit(terms, [text]) is None


@pytest.mark.parametrize(
    "text",
    [
        "This is a plain text, is it not? I am. A dog ran.",
        "**Bold** and _slanted_ words - e.g. `code` (*so*) - and a list:\n- one\n- two",
    ],
)
def test_usual_texts_are_cleared_at_once(text: str) -> None:
    """Nobody walks through prose and Markdown because letters might be parted."""
    assert not may_be_parted(text.lower().replace("\n", " "))
    glance = Glance()
    glance.close({}, parted=True)
    assert glance.clears(text)


def test_what_is_held_ends_with_the_gap() -> None:
    """A letter that may be spelled on is held; what shows that it is not lets it go, and what is held is bounded by the longest term."""
    scan = Scan(Terms([TermList(["banned"])]))
    for piece, free in [
        ("so b", 3),
        (" ", 3),
        ("a", 3),
        (" n", 3),
        ("o", 9),
        (" b.a", 10),
        (".n.n", 10),
        (" -", 10),
        (" ", 10),
        ("ban", 20),
        ("*", 20),
        (" ", 25),
    ]:
        assert scan.feed(piece) is None
        assert scan.free == free, piece


@pytest.mark.parametrize("filler", ["b a n ", "b_a_n_", "a ", "ban*", "b.a*n ", "内 幕 "])
def test_the_work_grows_with_the_text_alone(filler: str) -> None:
    """Texts that are made to be slow: ten times the text asks the terms ten times as often, not a hundred times."""

    def asked(times: int) -> int:
        count = 0

        def counted(road: Road) -> Road:
            def longest_prefix(text: str) -> int:
                nonlocal count
                count += 1
                return road.longest_prefix(text)

            return road._replace(longest_prefix=longest_prefix)

        terms = Terms([TermList(["banbanbanbanbanb x", "a" * 20 + "x", "内幕" * 10 + "x"])])
        terms.roads = {first: counted(road) for first, road in terms.roads.items()}
        text = filler * times
        assert first_hit(terms, [text[at : at + 7] for at in range(0, len(text), 7)]) is None
        return count

    few = asked(200)
    assert few <= asked(2000) <= 12 * few
