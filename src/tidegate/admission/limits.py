"""One request limit and one token limit per key, in this process.

Token buckets (Turner 1986, "leaky bucket as a meter"): a bucket of a minute's allowance refills continuously, so a burst of up to a minute's
worth passes and the rate over any longer time is kept. Tokens are reserved by an estimate before the run and settled with the true count
after it, so a bucket may owe for a moment and is then refilled before anybody passes again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tidegate.core.ask import Caller
from tidegate.core.errors import RateLimited

_MINUTE_NS = 60_000_000_000
Header = tuple[bytes, bytes]


class Bucket:
    """`per_minute` units that refill continuously; full at the start."""

    __slots__ = ("_at_ns", "_limit_line", "_remaining", "left", "per_minute", "what")

    def __init__(self, what: str, per_minute: int, now_ns: int) -> None:
        self.what = what
        self.per_minute = per_minute
        self.left = float(per_minute)
        self._at_ns = now_ns
        self._limit_line = (f"x-ratelimit-limit-{what}".encode(), b"%d" % per_minute)
        self._remaining = f"x-ratelimit-remaining-{what}".encode()

    def refill(self, units: float, now_ns: int) -> None:
        """Raises RateLimited where `units` are not there. More than the bucket holds needs a full bucket, not for ever."""
        per_minute = self.per_minute
        left = self.left + (now_ns - self._at_ns) * per_minute / _MINUTE_NS
        self.left = left = left if left < per_minute else float(per_minute)
        self._at_ns = now_ns
        if left < units and left < per_minute:
            raise _limited(self, (min(units, per_minute) - left) * 60.0 / per_minute)

    def headers(self) -> tuple[Header, Header]:
        return self._limit_line, (self._remaining, b"%d" % self.left if self.left > 0 else b"0")


class Ticket:
    """Leave to run. Exactly one of `settle` and `refund` takes effect, the first one called."""

    __slots__ = ("_requests", "_reserved", "_tokens")

    def __init__(self, requests: Bucket | None, tokens: Bucket | None, reserved: int) -> None:
        self._requests = requests
        self._tokens = tokens
        self._reserved = reserved

    def settle(self, used_tokens: int) -> None:
        """Book the true count instead of the estimate."""
        if self._tokens is not None:
            self._tokens.left += self._reserved - used_tokens
            self._tokens = None
        self._requests = None

    def refund(self) -> None:
        """Nothing ran: give back the request and its tokens."""
        if self._requests is not None:
            self._requests.left += 1
        self.settle(0)

    def headers(self) -> tuple[Header, ...]:
        """OpenAI's `x-ratelimit-*` headers, for the limits that are set."""
        requests, tokens = self._requests, self._tokens
        return (requests.headers() if requests is not None else ()) + (tokens.headers() if tokens is not None else ())


_FREE = Ticket(None, None, 0)


class Limits:
    """The buckets of all keys. Everything runs on the event loop's thread: no lock is needed."""

    def __init__(self, requests_per_minute: int = 0, tokens_per_minute: int = 0, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._requests_per_minute = requests_per_minute
        self._tokens_per_minute = tokens_per_minute
        self._clock_ns = clock_ns
        #: By key id: the bucket of requests and the bucket of tokens, where they are limited.
        self._buckets: dict[str, tuple[Bucket | None, Bucket | None]] = {}

    def admit(self, caller: Caller, estimated_tokens: int) -> Ticket:
        """Reserve one request and `estimated_tokens`, or raise RateLimited with the time after which this very request would pass."""
        per_minute = caller.requests_per_minute or self._requests_per_minute
        tokens_per_minute = caller.tokens_per_minute or self._tokens_per_minute
        if not per_minute and not tokens_per_minute:
            return _FREE
        now_ns = self._clock_ns()
        # What a caller says it will need is a claim: less than nothing would be a gift, and more than a full bucket never has to be owed.
        reserved = max(0, min(estimated_tokens, tokens_per_minute))
        requests, tokens = self._buckets.get(caller.key_id) or (None, None)
        if (requests.per_minute if requests else 0) != per_minute or (tokens.per_minute if tokens else 0) != tokens_per_minute:
            requests = _bucket("requests", requests, per_minute, now_ns)
            tokens = _bucket("tokens", tokens, tokens_per_minute, now_ns)
            self._buckets[caller.key_id] = requests, tokens
        if requests is not None:
            requests.refill(1, now_ns)
        if tokens is not None:
            tokens.refill(reserved, now_ns)
            tokens.left -= reserved
        if requests is not None:
            requests.left -= 1
        return Ticket(requests, tokens, reserved)


def _bucket(what: str, old: Bucket | None, per_minute: int, now_ns: int) -> Bucket | None:
    """The bucket that is there where its limit is still the same, else a new one."""
    if not per_minute or (old is not None and old.per_minute == per_minute):
        return old if per_minute else None
    return Bucket(what, per_minute, now_ns)


def _limited(bucket: Bucket, wait_s: float) -> RateLimited:
    return RateLimited(
        f"This key's limit of {bucket.per_minute} {bucket.what} per minute is used up.",
        hint=f"Try again in {wait_s:.1f} s, or ask the operator for a higher limit.",
        retry_after_s=wait_s,
    )
