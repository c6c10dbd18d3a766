"""Which limits a caller meets: those of its key, of its tenant, and of the capability that it asks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tidegate.admission.book import FULL_AT, LEFT, MONEY, REQUESTS, SECOND, TOKENS, USED, Book, Row, Seat, Way, digest
from tidegate.admission.prices import PARTS
from tidegate.admission.settings import Allowance, LimitSettings
from tidegate.core.ask import Caller

#: Seconds over which requests, tokens and money are counted.
PERIODS_S = (60.0, 60.0, 86_400.0)


class Subject(NamedTuple):
    """Somebody whose use is counted. `most`: requests and tokens per minute, ten-millionths of money per day, runs at a time; 0: no limit."""

    kind: str
    name: str
    most: tuple[int, int, int, int]

    def __str__(self) -> str:
        return "this key" if self.kind == "key" else f"{self.kind} {self.name}"


class Plan:
    """Where the limits of one caller and capability are in the book, worked out once.

    `whole`: by the limits themselves; `share`: by those of one of several machines that does not know of the others; `leased`: from leases.
    """

    __slots__ = ("caller", "capability", "leased", "money", "quick", "seated", "seats", "share", "subjects", "whole")

    def __init__(self, caller: Caller, capability: str, subjects: list[Subject], book: Book, machines: int, now: int) -> None:
        """Raises Full."""
        self.caller = caller
        self.capability = capability
        self.subjects = subjects
        self.seats: list[Seat] = []
        for subject in subjects:
            who = digest(subject.kind, subject.name)
            at = book.seat(who, now)
            self.seats.append(Seat(who, at, at + USED, subject.most[3]))
        counted = [seat for seat in self.seats if seat.most or book.counts_all]
        both = list(zip(self.seats, subjects, strict=True))
        rows = [row for seat, subject in both for row in _rows(seat.at, subject, 1)]
        self.whole = _way(counted, rows)
        self.share = _way(
            [seat._replace(most=max(1, seat.most // machines) if seat.most else 0) for seat in counted],
            [row for seat, subject in both for row in _rows(seat.at, subject, machines)],
        )
        self.leased = _way(counted, [row._replace(word=row.at + LEFT + row.kind, price=-1) for row in rows])
        self.money = any(row.kind == MONEY for row in rows)
        #: Whether nothing else is to be asked than the rates in the book.
        self.quick = False
        #: Whether runs at a time are limited.
        self.seated = any(seat.most for seat in counted)

    def subject_at(self, at: int) -> Subject:
        return next(subject for seat, subject in zip(self.seats, self.subjects, strict=True) if seat.at == at)


def _way(seats: list[Seat], rows: list[Row]) -> Way:
    plain = [(row.word, row.kind, row.price, row.depth, row.most, row.at, row.limit) for row in rows]
    return tuple((seat.who, seat.at, seat.used, seat.most) for seat in seats), tuple(plain), tuple(row for row in plain if row[1] != REQUESTS)


def _rows(at: int, subject: Subject, machines: int) -> Iterator[Row]:
    for kind in (REQUESTS, TOKENS, MONEY):
        limit = subject.most[kind]
        if limit:
            price = -(-int(PERIODS_S[kind]) * SECOND // limit)
            # A share of less than one unit is a unit, in more than a period.
            depth = max(limit * price, price * machines)
            yield Row(at + FULL_AT + kind, kind, price * machines, depth, max(1, limit // machines), at, limit)


def subjects(settings: LimitSettings, caller: Caller, capability: str) -> list[Subject]:
    """Who is counted for this caller and capability: only who has a limit."""
    own = settings.keys.get(caller.key_id)
    tenant = settings.tenants.get(caller.tenant)
    found = [
        Subject("key", caller.key_id, _most(own, Allowance(
            requests_per_minute=caller.requests_per_minute, tokens_per_minute=caller.tokens_per_minute, concurrent=caller.concurrent,
            money_per_day=caller.money_per_day), settings)),
        Subject("tenant", caller.tenant, _most(tenant, settings.each_tenant)),
    ]
    if capability and (limited := settings.capabilities.get(capability)) is not None:
        found.append(Subject("capability", capability, _most(limited)))
    return [subject for subject in found if any(subject.most)]


def _most(*said: Allowance | None) -> tuple[int, int, int, int]:
    """Of each limit the first that is said."""
    there = [one for one in said if one is not None]
    money = next((one.money_per_day for one in there if one.money_per_day), 0.0)
    return (
        next((one.requests_per_minute for one in there if one.requests_per_minute), 0),
        next((one.tokens_per_minute for one in there if one.tokens_per_minute), 0),
        # Less than a part is not nothing: that would be no limit.
        max(1, round(money * PARTS)) if money else 0,
        next((one.concurrent for one in there if one.concurrent), 0),
    )


def anything_is_limited(settings: LimitSettings) -> bool:
    return any(any(_most(one)) for one in _everybody(settings))


def money_is_limited(settings: LimitSettings) -> bool:
    return any(one.money_per_day for one in _everybody(settings))


def _everybody(settings: LimitSettings) -> list[Allowance]:
    return [settings, settings.each_tenant, *settings.keys.values(), *settings.tenants.values(), *settings.capabilities.values()]
