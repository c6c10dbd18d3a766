"""Simulations as people read them in a terminal, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tidegate.sizing.fitted import Fit
from tidegate.sizing.measures import STARVED, Measures, most_in_time
from tidegate.sizing.scenario import Scenario, differences, make_jobs
from tidegate.sizing.traces import Trace

#: The policy that the others are held against.
BOUND = "clairvoyant"


@dataclass(frozen=True, slots=True)
class Simulated:
    """One scenario and what came out. `bound`: more than this many cannot be in time, by whatever policy; known for bursts only. `fitted`:
    the engine's speeds, where they were taken from the trace."""

    scenario: Scenario
    trace: Trace
    figures: Mapping[str, Measures]
    bound: int | None
    fitted: Fit | None = None

    @property
    def title(self) -> str:
        asked = next(iter(self.figures.values())).asked
        return f"{asked:,} requests of {self.trace.format} on {self.scenario.slots} slots: {differences(self.scenario) or 'nothing changed'}"


def bound(trace: Trace, scenario: Scenario, seed: int) -> int | None:
    """See `most_in_time`; None where requests do not come at one instant."""
    if not scenario.burst:
        return None
    return most_in_time([job for job in make_jobs(trace, scenario, seed) if job.counted], scenario.engine, scenario.slo)


def as_json(done: Sequence[Simulated], seed: int) -> dict[str, Any]:
    """Everything that was measured, with the whole scenario."""
    return {
        "seed": seed,
        "scenarios": [
            {
                "scenario": asdict(one.scenario), "trace": one.trace.format, "cut": one.trace.cut, "skipped": one.trace.skipped, "bound": one.bound,
                "fitted": {"steps": one.fitted.steps, "wrong": round(one.fitted.wrong, 4)} if one.fitted is not None else None,
                "policies": {name: figures.as_json() for name, figures in one.figures.items()},
            }
            for one in done
        ],
    }  # fmt: skip


def render(done: Sequence[Simulated]) -> RenderableType:
    """A table for each scenario."""
    return Group(*(part for one in done for part in _scenario(one)))


def _scenario(one: Simulated) -> list[RenderableType]:
    parts: list[RenderableType] = [Text(one.title, "bold"), _table(one.figures), _legend(one.scenario.slo)]
    if one.bound is not None:
        parts.append(Text(f"No policy can have more than {one.bound:,} in time.", "dim"))
    if one.fitted is not None:
        within = f"half of the model's are within {100 * one.fitted.wrong:.0f} % of them"
        parts.append(Text(f"The speeds fit {one.fitted.steps:,} steps of the engine: {within}.", "dim"))
    if one.trace.cut:
        parts.append(Text("The trace goes on: `requests=N` takes more of it.", "dim"))
    if one.trace.skipped:
        parts.append(Text(f"{one.trace.skipped:,} records of the trace never ran and are left out.", "dim"))
    parts += [
        Text(f"{name}: {figures.returned:,} came back when they were told to; {_share(figures.kept)} of them passed, and "
             f"{_share(figures.good_later / figures.returned)} were in time then.")
        for name, figures in one.figures.items() if figures.returned
    ]  # fmt: skip
    return [*parts, Text()]


def _table(figures: Mapping[str, Measures]) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("policy", no_wrap=True)
    headings = (
        "in time", "share", f"of {BOUND}", "admitted", "refused", "wait P50", "P95", "P99", "longest", "first token P50", "P95", "P99", "Jain",
        "starved",
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    best = figures[BOUND].good if BOUND in figures else 0
    for name, one in figures.items():
        table.add_row(
            Text(name, "bold" if name == "tidegate" else ""), f"{one.good:,}", _share(one.goodput), _share(one.good / best) if best else "-",
            f"{one.admitted:,}", f"{one.refused:,}", *(_seconds(value) for value in one.wait_s.values()), _seconds(one.longest_wait_s),
            *(_seconds(value) for value in one.ttft_s.values()), "-" if math.isnan(one.jain) else f"{one.jain:.3f}", f"{one.starved:,}",
        )
    return table


def _legend(slo_s: float) -> Text:
    return Text(
        f"In time: first token within {slo_s:g} s of the first asking. Waits and first tokens: seconds, of the admitted, from when they last came. "
        f"Starved: waited over {STARVED * slo_s:g} s.", "dim",
    )


def _seconds(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.1f} %"
