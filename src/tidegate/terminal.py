"""Draws flights in a terminal: the waterfall to scale, the rhythm of the tokens, decisions and usage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from tidegate.core.chunk import CLEAN_ENDS
from tidegate.core.flight import FlightRecord, Lap
from tidegate.core.search import Ranking
from tidegate.engines.conformance import Report
from tidegate.retrieval.search import Searched

#: Eighths of a cell; in a terminal without Unicode the last row of ASCII_BLOCKS.
BLOCKS = " ▁▂▃▄▅▆▇█"
ASCII_BLOCKS = " ..::==##"
COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_yellow", "bright_magenta", "bright_blue")


class Strip:
    """A row of cells as wide as there is room, each filled to its share (0 to 1); what is not nothing is always seen."""

    def __init__(self, values: Sequence[tuple[float, float, float]], colour: str, least: int = 10) -> None:
        """`values`: (begin, end, share), where begin and end are parts of the row from 0 to 1 and share is how full it is there."""
        self._values = values
        self._style = Style(color=colour)
        self._least = least

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        blocks = ASCII_BLOCKS if options.ascii_only else BLOCKS
        cells = fill(self._values, options.max_width)
        yield Segment("".join(blocks[_eighths(cell)] for cell in cells), self._style)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(self._least, options.max_width)


def fill(values: Sequence[tuple[float, float, float]], width: int) -> list[float]:
    """How full each of `width` cells is, from 0 to 1: the time of each value lies in the cells that it covers."""
    cells = [0.0] * width
    for begin, end, share in values:
        first, last = begin * width, end * width
        for cell in range(min(int(first), width - 1), min(int(last), width - 1) + 1):
            cells[cell] += share * max(min(last, cell + 1) - max(first, cell), 1e-9)
    return [min(cell, 1.0) for cell in cells]


def _eighths(cell: float) -> int:
    return 0 if cell <= 0 else max(1, round(cell * 8))


def render_waterfall(record: FlightRecord) -> RenderableType:
    """One flight as it is shown by `tidegate flight ID`."""
    parts: list[RenderableType] = [_head(record), "", _waterfall(record.laps, record.whole_ns)]
    if record.token_ns:
        parts += ["", _tokens(record)]
    if record.decisions:
        parts += ["", _decisions(record)]
    return Group(*parts)


def _head(record: FlightRecord) -> RenderableType:
    well = record.end in CLEAN_ENDS and record.http_status < 400
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    code = "" if record.error_code in ("", record.end) else f", {record.error_code}"
    end = printable(f"{record.end}, HTTP {record.http_status}{code}")
    end.stylize("bold green" if well else "bold red")
    usage = record.usage
    tokens = f"{usage.prompt_tokens} prompt ({usage.cached_tokens} cached) + {usage.completion_tokens} completion"
    rows: list[tuple[str, RenderableType]] = [
        ("flight", printable(record.id, "bold")),
        ("began", Text(when(record.began_unix_ns))),
        ("route", printable(record.capability or record.route)),
        ("model", printable(f"{record.model or '-'}" + (f" on {record.engine}" if record.engine else ""))),
        ("tenant", printable(f"{record.tenant or '-'}" + (f", key {record.key_id}" if record.key_id else ""))),
        ("end", end),
        ("tokens", Text(f"{tokens}, {'as the engine counted' if usage.exact else 'estimated'}")),
    ]
    if record.prompt_version:
        rows.append(("prompt", printable(f"{record.prompt_version} ({record.prompt_sha256[:12]})")))
    if record.passage_ids:
        rows.append(("passages", printable(f"{len(record.passage_ids)} of index version {record.index_version or '-'}")))
    for name, value in rows:
        grid.add_row(name, value)
    return grid


def _waterfall(laps: Sequence[Lap], whole_ns: int) -> RenderableType:
    table = Table(box=None, expand=True, padding=(0, 1), pad_edge=False, show_footer=True)
    table.add_column("part", Text("whole", "bold"), no_wrap=True)
    table.add_column("", "", ratio=1)
    table.add_column("ms", Text(ms(whole_ns), "bold"), justify="right", no_wrap=True)
    table.add_column("%", Text("100.0", "bold"), justify="right", no_wrap=True)
    whole = max(whole_ns, 1)
    for n, (part, spans) in enumerate(spans_by_part(laps).items()):
        colour = COLOURS[n % len(COLOURS)]
        spent_ns = sum(end - begin for begin, end in spans)
        strip = Strip([(begin / whole, end / whole, 1.0) for begin, end in spans], colour)
        table.add_row(printable(part, colour), strip, ms(spent_ns), f"{100 * spent_ns / whole:.1f}")
    owned_ns = sum(spent for _, spent in laps)
    if owned_ns == whole_ns:
        return table
    return Group(table, Text(f"The parts add up to {ms(owned_ns)} ms, not to the whole: this record is not to be trusted.", "bold red"))


def spans_by_part(laps: Sequence[Lap]) -> dict[str, list[tuple[int, int]]]:
    """From laps to (begin, end) in ns since the flight began, by part, in the order in which the parts first came."""
    spans: dict[str, list[tuple[int, int]]] = {}
    at_ns = 0
    for part, spent_ns in laps:
        spans.setdefault(part, []).append((at_ns, at_ns + spent_ns))
        at_ns += spent_ns
    return spans


def _tokens(record: FlightRecord) -> RenderableType:
    gaps = [after - before for before, after in zip(record.token_ns, record.token_ns[1:], strict=False)]
    said = f"first token {ms(record.first_token_ns)} ms, {len(record.token_ns)} events"
    if not gaps:
        return Text(said)
    ordered = sorted(gaps)
    figures = [f"{name} {ms(ordered[-(-p * len(ordered) // 100) - 1])}" for name, p in (("P50", 50), ("P95", 95), ("max", 100))]
    said += f", then every {', '.join(figures)} ms"
    table = Table(box=None, expand=True, padding=(0, 1), pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(ratio=1)
    table.add_row("gaps", Gaps(gaps))
    return Group(Text(said), table)


class Gaps:
    """Times between tokens as a line of blocks, from the first to the last; the longest gap of those that share a cell is shown."""

    def __init__(self, gaps_ns: Sequence[int]) -> None:
        self._gaps_ns = gaps_ns

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        blocks = ASCII_BLOCKS if options.ascii_only else BLOCKS
        highest = max(self._gaps_ns) or 1
        yield Segment("".join(blocks[_eighths(gap / highest)] for gap in thin(self._gaps_ns, options.max_width)), Style(color="cyan"))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(10, len(self._gaps_ns)), options.max_width)


def thin(values: Sequence[int], width: int) -> list[int]:
    """At most `width` values: where several share a cell, the largest, so that no stall is hidden."""
    if len(values) <= width:
        return list(values)
    return [max(values[cell * len(values) // width : (cell + 1) * len(values) // width]) for cell in range(width)]


def _decisions(record: FlightRecord) -> RenderableType:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("at ms", justify="right", no_wrap=True, style="dim")
    table.add_column("decision", no_wrap=True)
    table.add_column("facts", overflow="fold")
    for at_ns, what, facts in record.decisions:
        table.add_row(ms(at_ns), printable(what), printable(", ".join(f"{name}={value}" for name, value in facts.items())))
    return table


def render_flights(records: Sequence[FlightRecord]) -> RenderableType:
    """The list of `tidegate flights`, newest first."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    # In a narrow terminal only the names give way (columns that may wrap, though one word does not): ids are copied, figures are read.
    table.add_column("flight", no_wrap=True, min_width=32)
    table.add_column("began", no_wrap=True, min_width=8)
    table.add_column("what", overflow="ellipsis")
    table.add_column("end", overflow="ellipsis")
    for name in ("ms", "ttft", "tokens"):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    for record in records:
        well = record.end in CLEAN_ENDS and record.http_status < 400
        table.add_row(
            printable(record.id), when(record.began_unix_ns)[11:19], printable(record.capability or record.route),
            printable(record.error_code or record.end, "green" if well else "red"),
            ms(record.whole_ns), ms(record.first_token_ns) if record.first_token_ns else "-", str(record.usage.completion_tokens),
        )
    return table


def render_engines(known: Mapping[str, Mapping[str, Any]]) -> RenderableType:
    """The engines of `tidegate drain`: whether each takes requests, and how many run on it in all workers."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("engine", no_wrap=True)
    table.add_column("state", overflow="fold")
    for name in ("requests", "tokens"):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    for name, engine in known.items():
        fleet = engine.get("fleet", {})
        state, style = _state(engine, fleet)
        table.add_row(printable(name), printable(state, style), str(fleet.get("requests", 0)), str(fleet.get("tokens_in_flight", "-")))
    return table


def _state(engine: Mapping[str, Any], fleet: Mapping[str, Any]) -> tuple[str, str]:
    if fleet.get("drained"):
        return ("drained: requests end on it" if fleet.get("requests") else "drained"), "yellow"
    if not engine.get("admitted", True):
        return "not admitted: it failed a check", "bold red"
    if "asked_not_before_s" in fleet:
        return f"asked to be left alone for {fleet['asked_not_before_s']} s", "yellow"
    breaker = fleet.get("breaker", "closed")
    return ("takes requests", "green") if breaker == "closed" else (f"breaker {str(breaker).replace('_', ' ')}", "bold red")


def render_search(found: Searched, *, legs: bool) -> RenderableType:
    """What `tidegate search` found: each passage with its text and where each leg had it; with `legs` also what each leg found."""
    parts: list[RenderableType] = [_road(found)]
    for n, passage in enumerate(found.passages, 1):
        page = f", page {passage.page}" if passage.page is not None else ""
        stands = [
            f"{leg} {one.rank} ({one.score:.3f}{f', covers {one.coverage:.2f}' if one.coverage is not None else ''})"
            for leg, one in found.stands(passage.id).items()
        ]
        if found.scores:
            stands.append(f"{found.reranker} {found.scores[n - 1]:.3f}")
        parts += [
            "", Text.assemble((f"{n} ", "bold"), printable(f"{passage.document}{page}", "bold"), printable(f"  {passage.title}", "dim")),
            Text("   ".join([*stands, passage.id]), "cyan"), *(printable(line) for line in (passage.shown or passage.text).split("\n")),
        ]
    for one, other in found.differing:
        parts += ["", Text(f"{one} and {other} say the same with other figures.", "yellow")]
    return Group(*parts, *([part for leg in found.legs for part in ("", _leg(found, leg))] if legs else []))


def _road(found: Searched) -> Text:
    count = len(found.passages)
    said = [f"{count} passage{'' if count == 1 else 's'} of index version {found.index_version} ({found.way.replace('_', ' ')})"]
    if found.words_only:
        said.append(f"by words alone: {found.words_only}")
    why_not = f": {found.not_reranked}" if found.not_reranked else ""
    said.append(f"in the order of {found.reranker}" if found.scores else f"not reranked{why_not}")
    if found.repeated:
        said.append(f"{found.repeated} left out that repeat others")
    if found.left_out:
        said.append(f"{found.left_out} characters left out")
    steps = ", ".join(f"{step} {ms(took)}" for step, took in found.took_ns.items())
    return Text(f"{'; '.join(said)}; {ms(sum(found.took_ns.values()))} ms ({steps})", "dim")


def _leg(found: Searched, leg: Ranking) -> RenderableType:
    places = {passage.id: str(n) for n, passage in enumerate(found.passages, 1)}
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, title=f"by {leg.leg}", title_justify="left")
    for name in (leg.leg, "score", *(["covers"] if leg.coverage else []), "shown as"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("passage", no_wrap=True)
    for at, id in enumerate(leg.ids):
        covers = [f"{leg.coverage[at]:.2f}"] if leg.coverage else []
        table.add_row(str(at + 1), f"{leg.scores[at]:.3f}", *covers, places.get(id, "-"), id)
    return table


VERDICT_STYLES = {"pass": "green", "fail": "bold red", "not proven": "yellow", "not applicable": "dim"}


def render_report(report: Report) -> RenderableType:
    """What `tidegate check` found, in the order of the checks."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("level", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("evidence", overflow="fold")
    for one in report.findings:
        table.add_row(one.name, one.level, Text(one.verdict, VERDICT_STYLES[one.verdict]), f"{one.ms:.0f}", printable(one.evidence))
    return Group(printable(f"{report.target}: {report.model} by {report.adapter}", "bold"), "", table, "", _summary(report))


def _summary(report: Report) -> RenderableType:
    wrong = [one.name for one in report.failed_musts]
    musts = [one for one in report.findings if one.level == "must"]
    proven = sum(one.verdict == "pass" for one in musts)
    said = f"{len(report.findings)} checks in {report.seconds:.1f} s"
    if report.limit_s:
        said += f" (by its speed about {report.estimate_s:.0f} s; at most {report.limit_s:.0f} s)"
    if wrong:
        return Text(f"{said}: {', '.join(wrong)} failed, so a gateway would not use it.", "bold red")
    return Text(f"{said}: no must failed, {proven} of {len(musts)} are proven.", "bold green")


def printable(said: str, style: str = "") -> Text:
    """Text from outside (a model's name is what a caller wrote): no control characters, so that it cannot steer the terminal."""
    return Text(plain(said), style)


def plain(said: str) -> str:
    """The same as a string. Names of files come from outside, too."""
    return "".join(char if char.isprintable() else "·" for char in said)


def ms(ns: int) -> str:
    """Nanoseconds as milliseconds with as many places as are read: 0.012, 1.23, 45.6, 1234."""
    value = ns / 1e6
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def when(unix_ns: int) -> str:
    """An instant in this machine's own time zone, to the millisecond."""
    return datetime.fromtimestamp(unix_ns / 1e9, UTC).astimezone().isoformat(sep=" ", timespec="milliseconds")
