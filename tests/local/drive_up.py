"""`tidegate up` with a stub gateway, as its own process: `drive_up.py JSON`, where JSON holds `settings` and further fields of the plan."""

import asyncio
import dataclasses
import json
import sys
from pathlib import Path

from tidegate.core.errors import TidegateError
from tidegate.local.plan import Command, Note, Running, UpPlan
from tidegate.local.settings import LocalSettings
from tidegate.local.up import up


def gateway(running: Running, fd: int) -> Command:
    told = {
        "dsn": running.dsn, "data": str(running.data), "embedder": running.embedder and str(running.embedder),
        "engine": running.engine and dataclasses.asdict(running.engine),
    }
    return Command([sys.executable, str(Path(__file__).with_name("stub_gateway.py")), str(fd)], {"STUB_TOLD": json.dumps(told)})


async def first_key(_running: Running, _note: Note) -> str:
    return "tg-stub"


def main() -> int:
    given = json.loads(sys.argv[1])
    plan = UpPlan(settings=LocalSettings(**given.pop("settings")), gateway=gateway, first_key=first_key, **given)
    try:
        return asyncio.run(up(plan))
    except TidegateError as error:
        print(f"ERROR {error.message}\nHINT {error.hint}")
        return 3


sys.exit(main())
