"""From flights to HTML: the templates, and what they are given."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from tidegate.api.page import form, health, rooms, waterfall, words
from tidegate.api.page.assets import Assets
from tidegate.api.page.deps import CapabilityView
from tidegate.api.page.passages import ReadPassage, Sheet
from tidegate.core.ask import Caller
from tidegate.core.flight import FlightRecord

_ROWS_KEPT = 2000


class Views:
    """Renders every page and fragment. A finished flight never changes, so its row is drawn once."""

    def __init__(self, assets: Assets, version: str) -> None:
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
            autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, auto_reload=False,
        )
        self._templates.globals.update(asset=assets.address, version=version, words=words, rooms=rooms)
        self._templates.filters["marked"] = words.marked
        self._rows: OrderedDict[str, Markup] = OrderedDict()

    def page(self, template: str, **values: Any) -> str:
        """A whole page."""
        return self._templates.get_template(template).render(**values)

    def rows(self, flights: Sequence[FlightRecord]) -> Markup:
        """The list's rows, one line of HTML each."""
        return Markup("\n").join(self._row(flight) for flight in flights)

    def health(self, told: dict[str, Any], recent: Sequence[FlightRecord]) -> Markup:
        """The head of the page: the body of /health, and the newest flights' times."""
        html = self.page("part/health.html", figures=health.figures(told, recent), reasons=health.reasons(told))
        return Markup(html)  # noqa: S704 - rendered by an autoescaping template

    def flight(self, record: FlightRecord, caller: Caller, read: Sequence[tuple[ReadPassage, str, str]] = (), down: str = "") -> str:
        """The page of one flight. `read`: its passages, each with why it has no picture and what to do; `down`: why they could not be looked up."""
        return self.page(
            "flight.html", title=f"Flight {record.id[:12]}", caller=caller, flight=record, parts=waterfall.parts(record),
            ticks=waterfall.ticks(record.whole_ns), rhythm=waterfall.rhythm(record), sum_ns=sum(ns for _, ns in record.laps),
            began=words.local(record.began_unix_ns), first_x=_first_token_x(record),
            read=read, down=down, decisions=[(at_ns, what, facts_of(facts)) for at_ns, what, facts in record.decisions],
        )

    def passage(
        self, record: FlightRecord, caller: Caller, passage: ReadPassage, sheets: Sequence[Sheet], why: str, hint: str
    ) -> str:
        """The page of one passage: on its pages, or why not."""
        title = passage.now.title if passage.now is not None else f"Passage {passage.n}"
        return self.page(
            "passage.html", title=title, caller=caller, flight=record, passage=passage, sheets=sheets, why=why, hint=hint,
            more=len(passage.pages) - len(sheets),
        )

    def capabilities(self, capabilities: Sequence[CapabilityView]) -> list[dict[str, Any]]:
        """What the ask box is drawn from."""
        return [
            {
                "path": one.path, "id": one.path.replace("/", "-"), "description": one.description, "streams": one.streams,
                "fields": form.fields(one.input_schema), "examples": form.examples(one.input_schema),
            }
            for one in capabilities
        ]

    def _row(self, flight: FlightRecord) -> Markup:
        if (row := self._rows.get(flight.id)) is None:
            strip = waterfall.strip(flight.laps, flight.whole_ns)
            html = self.page("part/row.html", flight=flight, strip=strip, began=words.local(flight.began_unix_ns))
            row = self._rows[flight.id] = Markup(" ".join(html.split()))  # noqa: S704 - rendered by an autoescaping template
            if len(self._rows) > _ROWS_KEPT:
                self._rows.popitem(last=False)
        return row


def _first_token_x(record: FlightRecord) -> float | None:
    return round(record.first_token_ns / record.whole_ns * waterfall.WIDTH, 3) if record.first_token_ns and record.whole_ns else None


def facts_of(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The facts of a decision as text: lists of plain values with commas, anything deeper as JSON."""
    return [(name, _said(fact)) for name, fact in facts.items()]


def _said(fact: Any) -> str:
    if fact is None or fact in ([], {}, ""):
        return "none"
    if isinstance(fact, bool):
        return "yes" if fact else "no"
    if isinstance(fact, list | tuple) and not any(isinstance(one, list | tuple | dict) for one in fact):
        return ", ".join(str(one) for one in fact)
    return fact if isinstance(fact, str) else json.dumps(fact, ensure_ascii=False, default=str)
