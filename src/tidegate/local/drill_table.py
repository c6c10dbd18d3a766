"""What a drill found, as people read it in a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tidegate.local.drill import Report, Seen, Sight, grouped

_STYLES: dict[Sight, str] = {"answer": "green", "message": "green", "error": "yellow", "bare": "red", "nothing": "red"}
_SAYS: dict[Sight, str] = {
    "answer": "an answer", "message": "a message with a ticket", "error": "an error with code and trace_id", "bare": "A BARE ERROR",
    "nothing": "NOTHING",
}


def render_drill(report: Report) -> RenderableType:
    """A row for each kind of thing that users saw; what was sent by name where it was not a good request."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for heading in ("when", "rung", "status", "code", "cause", "requests", "slowest", "what users saw", "it begins"):
        table.add_column(heading, justify="right" if heading in ("status", "requests", "slowest") else "left", overflow="fold")
    _row(table, "before", report.before, 1, report.before.seconds)
    for seen, count, slowest_s in grouped(report.during):
        _row(table, "during", seen, count, slowest_s)
    if report.after is not None:
        _row(table, "after", report.after, 1, report.after.seconds)
    return Group(Text(f"{report.drill} on {report.capability}", "bold"), Text(report.summary), Text(), table, Text(), *_verdict(report))


def _row(table: Table, when: str, seen: Seen, count: int, slowest_s: float) -> None:
    table.add_row(
        when, seen.rung or "-", str(seen.status or "-"), Text(seen.code or "-"), Text(seen.cause or "-"), str(count), f"{slowest_s:.1f} s",
        Text(_SAYS[seen.sight], _STYLES[seen.sight]), Text(seen.excerpt or seen.payload or "-"),
    )


def _verdict(report: Report) -> list[Text]:
    bad = [seen for seen in report.during if seen.sight in ("bare", "nothing")]
    lines = [Text(f"Caught by: {', '.join(report.caught_by)}." if report.caught_by else "Every request was refused before any rung.")]
    if report.back_after_s is not None:
        lines.append(Text(f"As before {report.back_after_s:.1f} s after the part was let go."))
    else:
        lines.append(Text("It did not come back: look at /health and the logs.", "red"))
    lines += [Text(f"{_SAYS[seen.sight]}: {seen.payload or seen.trace_id or seen.code}", "red") for seen in bad]
    lines.append(Text("passed", "bold green") if report.passed else Text("FAILED: users must never see this", "bold red"))
    return lines
