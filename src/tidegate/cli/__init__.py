"""The other door: the command line. Each command imports what it needs when it runs, so that `tidegate --help` is quick."""

from tidegate.cli import collections, drain, drill, engines, evaluate, flights, ingest, keys, ladder, plan, running, settings, simulate
from tidegate.cli.door import main

for _command in (
    running.up, running.serve, running.migrate, engines.scripted, engines.check, plan.plan, simulate.simulate, ladder.ladder, drill.drill,
    drain.drain, ingest.ingest, collections.index, collections.search, collections.explain, evaluate.evaluate, keys.keys, flights.flight,
    flights.flights, settings.show_settings, settings.version,
):
    main.add_command(_command)

__all__ = ["main"]
