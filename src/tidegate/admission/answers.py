"""How long the answers of one sort of request are, by the length of the prompt, learnt from those that ended.

Counts and sums are kept by half octave of the prompt's tokens. A half octave that has seen little says little, so its mean is drawn to those of its
neighbours, whose weight halves with every half octave between, and to the mean of all. How strongly to that of all is told by the answers themselves
(empirical Bayes, Efron and Morris 1973): by the variance inside the half octaves over the variance between their means. Where the length of a
prompt says nothing of its answer, all are expected to be alike. Between the half octaves the expectation runs in a straight line, so that inside of
one too it goes up or down as the answers do.

Pure: no clock, no I/O.
"""

from __future__ import annotations

from itertools import pairwise

#: What is thought of an answer, in tokens, before anything was measured.
ANSWER_TOKENS = 256.0
#: Means are over about the newest this many answers, of each half octave.
_NEWEST = 64
_KEPT = 1 - 1 / _NEWEST
#: Answers that the mean of the parent counts for, where this begins; and that the mean of all counts for in a half octave, until the variances tell.
_PRIOR = 1
_DRAWN = 4.0
#: Answers before the variances are believed, and the least and most that the mean of all counts for by them.
_ENOUGH = 16
_DRAWN_LEAST, _DRAWN_MOST = 0.01, 1e6
#: The weight of a neighbour.
_NEAR = 0.5
#: Half octaves that are told apart: the last holds all prompts of 12 million tokens and more.
_MOST = 46
#: An answer longer than so many times the mean, and this much, counts as that: a mistake of a count must not be remembered for ever.
_OVER, _OVER_TOKENS = 64.0, 4096.0


class Answers:
    """The answers of one sort. `mean`: tokens of all of them, over the newest; `seen`: how many there were."""

    __slots__ = ("_bases", "_counts", "_highest", "_lowest", "_parent", "_slopes", "_squares", "_sums", "mean", "seen")

    def __init__(self, parent: Answers | None) -> None:
        """`parent`: whose mean this begins with."""
        self._parent = parent
        self.mean: float = parent.mean if parent is not None else ANSWER_TOKENS
        self.seen = 0
        self._counts = [0.0] * (_MOST + 1)
        self._sums = [0.0] * (_MOST + 1)
        self._squares = [0.0] * (_MOST + 1)
        self._lowest, self._highest = _MOST, 0
        #: By half octave: what is expected is base + slope * prompt tokens.
        self._bases = [self.mean] * (_MOST + 1)
        self._slopes = [0.0] * (_MOST + 1)

    def expect(self, prompt_tokens: int) -> float:
        """Tokens that the answer to such a prompt is expected to have."""
        if self._lowest > self._highest:  # nothing was told by length
            return self._parent.expect(prompt_tokens) if self._parent is not None and not self.seen else self.mean
        if prompt_tokens < 0:
            prompt_tokens = 0
        at = _HALF_OCTAVES[prompt_tokens] if prompt_tokens < 4096 else half_octave(prompt_tokens)
        return self._bases[at] + self._slopes[at] * prompt_tokens

    def learn(self, prompt_tokens: int, answer_tokens: float) -> None:
        """A request with such a prompt was answered with so many tokens."""
        most = _OVER * self.mean + _OVER_TOKENS
        answer_tokens = 0.0 if answer_tokens < 0.0 else answer_tokens if answer_tokens < most else most
        at = _HALF_OCTAVES[prompt_tokens] if 0 <= prompt_tokens < 4096 else half_octave(prompt_tokens)
        counts, sums, squares = self._counts, self._sums, self._squares
        if counts[at] >= _NEWEST:
            counts[at] *= _KEPT
            sums[at] *= _KEPT
            squares[at] *= _KEPT
        counts[at] += 1.0
        sums[at] += answer_tokens
        squares[at] += answer_tokens * answer_tokens
        if at < self._lowest:
            self._lowest = at
        if at > self._highest:
            self._highest = at
        self._tell(answer_tokens)
        if self.seen < _ENOUGH or self.seen % (8 if self.seen < 4 * _NEWEST else 64) == 0:  # it changes slowly
            self._draw()

    def _tell(self, answer_tokens: float) -> None:
        self.seen = seen = self.seen + 1
        parent = self._parent
        self.mean += (answer_tokens - self.mean) / ((_PRIOR if parent is not None else 0) + (seen if seen < _NEWEST else _NEWEST))
        if parent is not None and (seen < _NEWEST or seen % 4 == 0):  # what is above needs not each
            parent._tell(answer_tokens)

    def _draw(self) -> None:
        """The lines anew."""
        counts, sums, mean, first, last = self._counts, self._sums, self.mean, self._lowest, self._highest
        drawn = self._drawn()
        told = [(drawn, drawn * mean)] * (last - first + 1)
        for way in (range(first, last + 1), range(last, first - 1, -1)):  # what comes from shorter prompts, and from longer ones
            count = total = 0.0
            for at in way:
                have, of = told[at - first]
                told[at - first] = (have + count, of + total)
                count, total = _NEAR * (count + counts[at]), _NEAR * (total + sums[at])
        means = [(of + sums[first + n]) / (have + counts[first + n]) for n, (have, of) in enumerate(told)]
        between = [(one + other) / 2 for one, other in pairwise(means)]
        # the outermost lines go through their means
        edges = [max(2 * means[0] - between[0], 0.0), *between, max(2 * means[-1] - between[-1], 0.0)] if between else [means[0], means[0]]
        bases, slopes = self._bases, self._slopes
        for at in range(_MOST + 1):
            if first <= at <= last and at < _MOST:
                begin, end = edges[at - first], edges[at - first + 1]
                slopes[at] = slope = (end - begin) / (_BEGINS[at + 1] - _BEGINS[at])
                bases[at] = begin - slope * _BEGINS[at]
            else:
                bases[at], slopes[at] = edges[0] if at < first else edges[-1], 0.0

    def _drawn(self) -> float:
        """How many answers the mean of all counts for: the variance inside the half octaves over that between their means (one-way analysis of
        variance, by moments)."""
        some = [(n, s, q) for n, s, q in zip(self._counts, self._sums, self._squares, strict=True) if n]
        whole = sum(n for n, _, _ in some)
        free, groups = whole - len(some), len(some) - 1
        if free < _ENOUGH or not groups:
            return _DRAWN
        mean = sum(s for _, s, _ in some) / whole
        inside = max(sum(q - s * s / n for n, s, q in some), 0.0) / free
        between = sum(s * s / n for n, s, _ in some) - whole * mean * mean - groups * inside
        between /= whole - sum(n * n for n, _, _ in some) / whole
        return min(max(inside / between, _DRAWN_LEAST), _DRAWN_MOST) if between > 0.0 else _DRAWN_MOST


def half_octave(tokens: int) -> int:
    """The number of the half octave: 64 to 95 is one, 96 to 127 the next, 128 to 191 the one after. 0 and 1 (and less) are the first."""
    if tokens < 2:
        return 0
    bits = tokens.bit_length()
    at = (bits << 1 | (tokens >> (bits - 2)) & 1) - 3
    return at if at < _MOST else _MOST


_HALF_OCTAVES = [half_octave(tokens) for tokens in range(4096)]
_BEGINS = [0, 2, *((2 + (at & 1)) << (at >> 1) for at in range(1, _MOST))]
