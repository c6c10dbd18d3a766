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


class Bucket:
    """`per_minute` units that refill continuously; full at the start."""

    __slots__ = ("at_ns", "left", "per_minute")

    def __init__(self, per_minute: int, now_ns: int) -> None:
        self.per_minute = per_minute
        self.left = float(per_minute)
        self.at_ns = now_ns

    def refill(self, now_ns: int) -> None:
        self.left = min(float(self.per_minute), self.left + (now_ns - self.at_ns) * self.per_minute / _MINUTE_NS)
        self.at_ns = now_ns

    def wait_s(self, units: float) -> float:
        """Seconds until `units` are there, 0 where they are. More than the bucket holds needs a full bucket, not for ever."""
        missing = min(units, float(self.per_minute)) - self.left
        return max(0.0, missing * 60.0 / self.per_minute)


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

    def headers(self) -> list[tuple[bytes, bytes]]:
        """OpenAI's `x-ratelimit-*` headers, for the limits that are set."""
        lines: list[tuple[bytes, bytes]] = []
        for what, bucket in ((b"requests", self._requests), (b"tokens", self._tokens)):
            if bucket is not None:
                lines.append((b"x-ratelimit-limit-" + what, b"%d" % bucket.per_minute))
                lines.append((b"x-ratelimit-remaining-" + what, b"%d" % max(0, int(bucket.left))))
        return lines


_FREE = Ticket(None, None, 0)


class Limits:
    """The buckets of all keys. Everything runs on the event loop's thread: no lock is needed."""

    def __init__(self, requests_per_minute: int = 0, tokens_per_minute: int = 0, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._requests_per_minute = requests_per_minute
        self._tokens_per_minute = tokens_per_minute
        self._clock_ns = clock_ns
        self._requests: dict[str, Bucket] = {}
        self._tokens: dict[str, Bucket] = {}

    def admit(self, caller: Caller, estimated_tokens: int) -> Ticket:
        """Reserve one request and `estimated_tokens`, or raise RateLimited with the time after which this very request would pass."""
        per_minute = caller.requests_per_minute or self._requests_per_minute
        tokens_per_minute = caller.tokens_per_minute or self._tokens_per_minute
        if not per_minute and not tokens_per_minute:
            return _FREE
        now_ns = self._clock_ns()
        # What a caller says it will need is a claim: less than nothing would be a gift, and more than a full bucket never has to be owed.
        reserved = max(0, min(estimated_tokens, tokens_per_minute))
        requests = self._bucket(self._requests, caller.key_id, per_minute, now_ns)
        tokens = self._bucket(self._tokens, caller.key_id, tokens_per_minute, now_ns)
        if requests is not None and (wait_s := requests.wait_s(1)) > 0:
            raise _limited("requests", requests, wait_s)
        if tokens is not None and (wait_s := tokens.wait_s(reserved)) > 0:
            raise _limited("tokens", tokens, wait_s)
        if requests is not None:
            requests.left -= 1
        if tokens is not None:
            tokens.left -= reserved
        return Ticket(requests, tokens, reserved)

    def _bucket(self, buckets: dict[str, Bucket], key_id: str, per_minute: int, now_ns: int) -> Bucket | None:
        if not per_minute:
            return None
        bucket = buckets.get(key_id)
        if bucket is None or bucket.per_minute != per_minute:
            bucket = buckets[key_id] = Bucket(per_minute, now_ns)
        bucket.refill(now_ns)
        return bucket


def _limited(what: str, bucket: Bucket, wait_s: float) -> RateLimited:
    return RateLimited(
        f"This key's limit of {bucket.per_minute} {what} per minute is used up.",
        hint=f"Try again in {wait_s:.1f} s, or ask the operator for a higher limit.",
        retry_after_s=wait_s,
    )
