"""How fast the engines of a lane read prompts and tell answers, from when requests began, had their first token, and ended.

**What a token of the prompt takes** is the slope of the times to first token over the lengths of the prompts, less what the running streams had of
the engine meanwhile (chunked prefill gives each a token with every chunk). **What a token of the answer costs**, in prompt tokens: the time in which
anything ran, by the part of the slots that was taken, less the time of the prompts that were read, over the tokens of the answers; and that over the
time of a prompt token.

**How much may be unread.** An engine that reads one prompt after the other lets a newcomer wait for all that it has not read yet: in its own order,
where a short prompt stands behind long ones and holds a slot meanwhile. So no more begins while what is unread would keep a newcomer waiting for
HOLD_S. How long that is tells the slope of the times to first token over the tokens that were unread when they began, at the same length of the
prompt (least squares on both). An engine that reads many prompts as fast as one has a slope of nought, and no bound. Where the unread tokens vary
little the slope cannot be known; it is drawn to nought then (ridge regression), so that the bound opens until they vary enough.

Means fade, no measurement counts for more than some times what was expected, and time that runs backwards counts as none: neither a stall nor a clock
that jumps moves them far. Pure: no clock of its own, no I/O.
"""

from __future__ import annotations

import math

#: What a token of the answer costs before anything was measured, in prompt tokens; and the bounds of what is measured.
ANSWER_COST = 20.0
ANSWER_COST_LEAST, ANSWER_COST_MOST = 1.0, 400.0
#: What is unread may keep a newcomer waiting this long inside the engine.
HOLD_S = 0.25
#: The part of a prompt's time to first token that is its own where it is long: the rest of each step is that of the streams.
_OWN = 0.8
#: Measurements are over about the newest this many; the first guess counts for so many; so many are needed before they are believed.
_NEWEST = 64
_KEPT = 1 - 1 / _NEWEST
_GUESS = 8
_ENOUGH = 16
#: The most that one measurement counts for, as a multiple of what was expected.
_OVER = 8.0
#: Slopes are drawn as if the tokens varied by this part of a mean prompt more.
_VARY = 0.25


class Speeds:
    """What one lane has measured. `answer_cost`: what a token of the answer costs; `read_ns`: what one of a prompt takes, 0 where that is not known;
    `most_unread`: tokens unread at which no more may begin; `reading`, `unread`: prompts, and their tokens, that engines have and have not answered
    with a first token; `share_ns`: time divided by how many ran at each instant, what each had of the engines if all had the same."""

    __slots__ = (
        "_at_ns", "_ends", "_firsts", "_free_ns", "_means", "_products", "_read", "_sums", "_work_ns", "answer_cost", "most_unread", "read_ns",
        "reading", "share_ns", "unread",
    )  # fmt: skip

    def __init__(self, now_ns: int) -> None:
        self.answer_cost = ANSWER_COST
        self.most_unread = math.inf
        self.read_ns = 0.0
        self.share_ns = 0  # whole, so that what is added to sums and taken away again leaves nothing
        self.reading = self.unread = 0
        self._at_ns = now_ns
        #: Since the last end, by the part of the slots that was taken: time in which anything ran, in which nothing was read, prompt tokens read.
        self._work_ns = self._free_ns = self._read = 0.0
        #: The same over the newest, and tokens of answers.
        self._sums = (0.0, 0.0, 0.0, 0.0)
        self._ends = self._firsts = 0
        #: Of times to first token (s), prompt tokens, tokens unread before: means, and means of products about them (fp, fu, pp, pu, uu).
        self._means = (0.0, 0.0, 0.0)
        self._products = (0.0, 0.0, 0.0, 0.0, 0.0)

    def pass_time(self, now_ns: int, running: int, slots: int) -> None:
        """So many have run until now, since this was called last."""
        took_ns = now_ns - self._at_ns
        self._at_ns = now_ns
        if took_ns <= 0 or not running:
            return
        self.share_ns += took_ns // running
        part_ns = took_ns * running / slots if running < slots else took_ns
        self._work_ns += part_ns
        if not self.reading:
            self._free_ns += part_ns

    def begin(self, prompt_tokens: int) -> int:
        """An engine begins to read a prompt. Returns the tokens that were unread before it."""
        before = self.unread
        self.reading += 1
        self.unread = before + prompt_tokens
        return before

    def leave(self, prompt_tokens: int) -> None:
        """A prompt that was begun is read, or was given up."""
        self.reading -= 1
        self.unread -= prompt_tokens

    def first_token(self, prompt_tokens: int, unread_before: int, took_ns: int, part: float) -> None:
        """A prompt was read, `took_ns` after it was begun. `part`: of the slots that is taken."""
        if prompt_tokens < 1:
            prompt_tokens = 1
        self._read += prompt_tokens * part
        self._firsts = firsts = self._firsts + 1
        # of those that were alone few are enough, and later of the others too
        if firsts < _ENOUGH or firsts % 4 == 0 or (unread_before and (firsts < _NEWEST or firsts % 2 == 0)):
            self._regress(took_ns / 1e9 if took_ns > 0 else 0.0, prompt_tokens, unread_before)

    def end(self, answer_tokens: int) -> None:
        """An answer of so many tokens has ended."""
        if answer_tokens < 0:
            answer_tokens = 0
        work, free, read, told = self._sums
        new_work, new_free, new_read = self._work_ns, self._free_ns, self._read
        self._work_ns = self._free_ns = self._read = 0.0
        self._ends = ends = self._ends + 1
        if ends > _ENOUGH:
            cost = self.answer_cost
            most = _OVER * work * (new_read + cost * answer_tokens + 1.0) / (read + cost * told + 1.0)
            if new_work > most:
                new_work, new_free = most, new_free * most / new_work
        self._sums = (work * _KEPT + new_work, free * _KEPT + new_free, read * _KEPT + new_read, told * _KEPT + answer_tokens)
        if ends < _NEWEST or ends % 4 == 0:  # it changes slowly
            self._tell_cost()

    def _tell_cost(self) -> None:
        work, free, read, told = self._sums
        if read > 0.0 and told > 0.0 and self.read_ns > 0.0:
            measured = max(work - self.read_ns * read, free) / told / self.read_ns
            measured = min(max(measured, ANSWER_COST_LEAST), ANSWER_COST_MOST)
            known = min(self._firsts, self._ends, _NEWEST)
            self.answer_cost = ANSWER_COST * (measured / ANSWER_COST) ** (known / (known + _GUESS))

    def _regress(self, took_s: float, prompt: int, unread: int) -> None:
        mf, mp, mu = self._means
        firsts = self._firsts
        if firsts > _ENOUGH:
            most = _OVER * mf * max(1.0, (prompt + unread) / (mp + mu))
            if took_s > most:
                took_s = most
        step = 1.0 / firsts if firsts < _NEWEST else 1.0 / _NEWEST
        df, dp, du = took_s - mf, prompt - mp, unread - mu
        self._means = (mf + df * step, mp + dp * step, mu + du * step)
        keep = 1.0 - step
        fp, fu, pp, pu, uu = self._products
        self._products = (keep * (fp + df * dp * step), keep * (fu + df * du * step), keep * (pp + dp * dp * step), keep * (pu + dp * du * step),
                          keep * (uu + du * du * step))  # fmt: skip
        if firsts >= _ENOUGH and firsts % 4 == 0:
            self._tell_slopes()

    def _tell_slopes(self) -> None:
        mf, mp, _ = self._means
        fp, fu, pp, pu, uu = self._products
        work, _, read, told = self._sums
        guess = work / 1e9 / (read + ANSWER_COST * told) if read + told > 0.0 else 0.0  # of the slope over the prompt; of the other it is nought
        ridge = (_VARY * mp) ** 2
        pp, uu, fp = pp + ridge, uu + ridge, fp + ridge * guess
        rest = pp * uu - pu * pu  # above nought: the ridge makes it so
        waits_s = (fu * pp - fp * pu) / rest
        self.most_unread = HOLD_S / waits_s if waits_s > 1e-12 else math.inf
        read_s = (fp * uu - fu * pu) / rest
        self.read_ns = 1e9 * _OWN * min(max(read_s, guess / ANSWER_COST), mf / mp)
