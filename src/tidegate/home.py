"""Composes `tidegate up`: the parts of this machine, with a gateway on them, a first key and the examples."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
from pydantic import SecretStr

from tidegate.api.control import NewKey, make_key
from tidegate.api.page.tokens import TokenFolder
from tidegate.app.parts import PARTS, LocalParts, closing, open_passages, open_store, with_parts, write_private
from tidegate.core.ask import Caller
from tidegate.core.errors import LocalPartError, SettingsError
from tidegate.core.keys import hash_key
from tidegate.core.toml import dotted
from tidegate.local.plan import Command, Note, Running, UpPlan, ask_engine
from tidegate.local.slices import Slice
from tidegate.local.up import up as run_up
from tidegate.pipeline.capability import load_all
from tidegate.retrieval.embedder_client import EmbedderClient
from tidegate.retrieval.ingest import ingest
from tidegate.settings import EMBEDDED, Settings
from tidegate.stores.migrate import migrate

EXAMPLES = "harbour-mutual"
QUESTION = "How long do I have to report a car accident?"


def up(settings: Settings, *, port_by_hand: bool) -> int:
    """`tidegate up`: every part on this machine, until Ctrl-C."""
    load_all(settings.capabilities.folders)  # a broken one is said before anything starts
    home = _Home(settings, Path(__file__).parent / "examples")
    plan = UpPlan(
        settings=settings.local, gateway=home.gateway, host=settings.server.host, port=settings.server.port, port_by_hand=port_by_hand,
        slices=slices_of(settings),
        migrate=home.migrate, first_key=home.first_key, examples=home.load_examples, curl=home.curl, page=home.page, embedder=settings.embedder,
    )
    return asyncio.run(run_up(plan))


class _Home:
    """What `tidegate up` asks of the rooms: settings for the gateway, the first key, the examples."""

    def __init__(self, settings: Settings, examples: Path) -> None:
        self._settings = settings
        self._examples = examples
        folders = [Path(folder).expanduser().resolve() for folder in settings.capabilities.folders]
        #: Whether the example capabilities are served, alone or among others.
        self._serves_examples = not folders or (examples / "capabilities").resolve() in folders
        self._caller: Caller | None = None

    def gateway(self, running: Running, fd: int) -> Command:
        """The gateway is `tidegate serve` with the same settings and the parts' addresses; secrets travel in its environment."""
        settings = self._settings
        argv = [sys.executable, "-P", "-m", "tidegate.cli", "serve", "--fd", str(fd)]
        if settings.file is not None:
            argv += ["--config", str(settings.file.absolute())]
        env = _from_flags(settings) | {
            "TIDEGATE_LOCAL__DATA": str(running.data), "TIDEGATE_SERVER__GRACE_S": str(int(settings.local.drain_s)),
        }
        if running.dsn:
            env["TIDEGATE_STORE__DSN"] = running.dsn
        if running.embedder:
            env["TIDEGATE_EMBEDDER__SOCKET"] = str(running.embedder)
        if running.engine:
            env |= {
                "TIDEGATE_ENGINES__LOCAL__ADAPTER": "llama_cpp", "TIDEGATE_ENGINES__LOCAL__URL": running.engine.url,
                "TIDEGATE_ENGINES__LOCAL__API_KEY": running.engine.key, "TIDEGATE_ENGINES__LOCAL__MODELS": json.dumps([running.engine.model]),
                "TIDEGATE_ENGINES__LOCAL__SLOTS": str(running.engine.slots),
            }
            if settings.provenance["budgets.profile"][1] == "default":
                env["TIDEGATE_BUDGETS__PROFILE"] = EMBEDDED
        for own in slices_of(settings) if running.own else ():
            address, section = running.own[own.name], f"TIDEGATE_ENGINES__{own.name.upper()}__"
            env |= {
                f"{section}ADAPTER": "llama_cpp", f"{section}URL": address.url, f"{section}API_KEY": address.key,
                f"{section}MODELS": json.dumps([address.model]), f"{section}SLOTS": str(address.slots),
            }
            argv += ["--set", f"{dotted(('tenants', own.tenant, 'instances'))}={json.dumps([own.name])}"]
        if running.small:
            env |= {
                "TIDEGATE_ENGINES__SMALL__ADAPTER": "llama_cpp", "TIDEGATE_ENGINES__SMALL__URL": running.small.url,
                "TIDEGATE_ENGINES__SMALL__API_KEY": running.small.key,
                "TIDEGATE_ENGINES__SMALL__MODELS": json.dumps([running.small.model]),
                "TIDEGATE_ENGINES__SMALL__SLOTS": str(running.small.slots),
            }
        if not settings.capabilities.folders:
            env["TIDEGATE_CAPABILITIES__FOLDERS"] = json.dumps([str(self._examples / "capabilities")])
        return Command(argv, env)

    async def migrate(self, running: Running, note: Note) -> None:
        if dsn := self._dsn(running):
            await asyncio.to_thread(migrate, dsn)

    async def first_key(self, running: Running, note: Note) -> str | None:
        """The key of the last start where it still works, else a new one, kept in a file that only this user reads."""
        file = running.data / "first-key"
        parts = LocalParts(running.dsn or "", str(running.embedder or ""))
        write_private(running.data / PARTS, msgspec.json.encode(parts))
        async with open_store(self._with_database(running)) as store:
            known = {key.sha256: key for key in await store.list_keys() if key.revoked_unix_s is None}
            saved = file.read_text().strip() if file.exists() else ""
            record = known.get(hash_key(saved)) if saved else None
            if record is None:
                saved, record = make_key(NewKey(tenant="default", role="data", name="first key", requests_per_minute=0, tokens_per_minute=0))
                await store.add_key(record)
                write_private(file, saved.encode() + b"\n")
        self._caller = Caller(record.id, record.tenant, record.role)
        return saved

    async def load_examples(self, running: Running, note: Note) -> None:
        """The example documents, where the example capabilities are served."""
        if running.embedder is None or not self._serves_examples or not self._dsn(running):
            return
        client = EmbedderClient(running.embedder)
        async with open_passages(self._with_database(running)) as store, closing(client):
            report = await ingest(
                [self._examples / "documents"], collection=EXAMPLES, embedder=client, store=store,
                progress=lambda said: note(f"{said.done} of {said.total} documents"), base=self._examples,
                settings=self._settings.retrieval,
            )
        for path, why in report.failed:
            raise LocalPartError(f"The example document {path} could not be read: {why}", hint="Is the installation whole?")

    def curl(self, url: str, key: str, running: Running) -> str:
        """A question to the example capability, or to the engine where the examples are not served."""
        if not self._serves_examples or running.embedder is None:
            return ask_engine(url, key, running)
        return (
            f"curl -N {url}/api/v1/support/answer -H 'Authorization: Bearer {key}' -H 'Accept: text/event-stream' "
            f"-d '{{\"question\": \"{QUESTION}\"}}'"
        )

    def page(self, url: str, running: Running) -> str:
        """The page's address with a link that signs in once, so that the first look needs no copying of keys."""
        if self._caller is None:
            return f"{url}/"
        token = TokenFolder(running.data / "run" / "links").issue(self._caller)
        return f"{url}/login?token={token}"

    def _dsn(self, running: Running) -> str:
        return running.dsn or self._settings.store.dsn

    def _with_database(self, running: Running) -> Settings:
        return with_parts(self._settings, LocalParts(self._dsn(running)))


def slices_of(settings: Settings) -> list[Slice]:
    """The engines that tenants have for themselves on this machine. Raises SettingsError where they cannot be run here."""
    apart = [(name, one) for name, one in settings.tenants.items() if one.isolation == "device" and (one.cores or one.gpu)]
    for name, one in apart:
        if one.instances:
            raise SettingsError(
                f"[tenants.{name}] has instances, and cores or a gpu for an engine of this machine.",
                hint="Leave out the instances: `tidegate up` runs the engine. Or leave out cores and gpu: the instances have their own.",
            )
        if not settings.local.engine:
            raise SettingsError(
                f"[tenants.{name}] has cores or a gpu for an engine of this machine, but local.engine is false.",
                hint="Set local.engine = true, or name the tenant's engines in its instances.",
            )
    free = (name for number in itertools.count(1) if (name := f"own{number}") not in settings.engines)
    return [Slice(next(free), name, tuple(one.cores), one.gpu) for name, one in apart]


def _from_flags(settings: Settings) -> dict[str, str]:
    """What was set on the command line, as environment: file and environment reach the gateway by themselves, flags do not."""
    return {
        "TIDEGATE_" + name.upper().replace(".", "__").replace("-", "_"): _text(value)
        for name, (value, source) in settings.provenance.items()
        if source == "flag"
    }


def _text(value: Any) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return json.dumps(value) if isinstance(value, list | dict | bool) else str(value)
