"""The command simulate: admission policies on a recorded load."""

from __future__ import annotations

import json
from pathlib import Path

import click

from tidegate.cli.console import WIDE, console
from tidegate.cli.options import settings_from, settings_options


@click.command()
@click.option("--trace", "file", required=True, metavar="FILE", type=click.Path(path_type=Path), help="When requests came and how long they were.")
@click.option("--what-if", "what_ifs", metavar="KEY=VALUE,...", multiple=True, help="A scenario, e.g. slots=24,burst=2000; more than once for more.")
@click.option("--fit", "fits", is_flag=True, help="Take the engine's speeds from the trace: recorded flights tell when the engine served them.")
@click.option("--policy", "names", metavar="NAME", multiple=True, help="Only these policies.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same figures.")
@click.option("--plot", metavar="FILE.svg", type=click.Path(path_type=Path), help="Also draw the times to first token.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@settings_options
def simulate(
    file: Path, what_ifs: tuple[str, ...], fits: bool, names: tuple[str, ...], seed: int, plot: Path | None, as_json: bool, config: Path | None,
    sets: tuple[str, ...],
) -> None:
    """Try admission policies on a recorded load, on an engine model under a virtual clock.

    All keys of --what-if, the engine model and the formats of traces are in docs/simulate.md. The gateway's own policy has the settings
    [admission] and [classes.NAME].
    """
    from tidegate.sizing import plots, tables
    from tidegate.sizing.fitted import fit
    from tidegate.sizing.gated import tidegate
    from tidegate.sizing.scenario import Scenario, parse
    from tidegate.sizing.simulate import policies
    from tidegate.sizing.simulate import simulate as run
    from tidegate.sizing.traces import read

    settings = settings_from(config, sets)
    chosen = policies(names, tidegate(settings.admission, settings.classes))
    done = []
    for said, asked in [(said, parse(said)) for said in what_ifs or ("",)]:
        trace = read(file, asked.requests, seed)
        fitted = fit(trace.arrivals, asked.engine) if fits else None
        speed = asked.engine if fitted is None else fitted.speed
        scenario = parse(said, Scenario(prefill=speed.prefill, decode=speed.decode, half=speed.half))  # what is said counts all the same
        done.append(tables.Simulated(scenario, trace, run(trace, scenario, chosen, seed), tables.bound(trace, scenario, seed), fitted))
    if plot is not None:
        plots.write(plot, [(one.title, one.scenario.slo, one.figures) for one in done])
    if as_json:
        click.echo(json.dumps(tables.as_json(done, seed), indent=2))
    else:
        console(WIDE).print(tables.render(done))
