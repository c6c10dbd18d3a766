"""The parts that a process reaches: the database and the embedder of the settings, or those of the `tidegate up` on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from tidegate.core.errors import SettingsError
from tidegate.core.ports import Embedder, KeyStore, PassageStore
from tidegate.local.child import Child
from tidegate.local.embedder import LocalEmbedder
from tidegate.local.folder import DataFolder
from tidegate.retrieval.embedder_client import EmbedderClient
from tidegate.settings import Settings
from tidegate.stores.systems.postgres import Postgres

log = logging.getLogger(__name__)

#: Where `tidegate up` tells what it runs, below the data folder.
PARTS = "run/parts.json"


@contextlib.asynccontextmanager
async def open_embedder(settings: Settings, *, own: bool = True) -> AsyncIterator[Embedder | None]:
    """The embedder that the settings ask for: a supervisor's child, one of our own, one in this process, or none. Where `own` is false
    another worker runs the child."""
    wanted = settings.embedder
    if wanted.mode == "in_process":
        from tidegate.retrieval.embedder import LocalEmbedder as InProcess  # loads the model runtime, which the gateway else never does

        inside = InProcess(
            settings.local.folder / "cache", threads=wanted.threads, max_length=wanted.max_length, batch_tokens=wanted.batch_tokens,
            runtime=wanted.runtime,
        )
        try:
            yield inside
        finally:
            await inside.close()
        return
    async with contextlib.AsyncExitStack() as stack:
        path = wanted.socket
        if path is None and settings.local.embedder:
            if own:
                path = await stack.enter_async_context(own_embedder(settings))
            else:
                path = LocalEmbedder(DataFolder(settings.local.folder), settings.local, wanted).socket
        if path is None:
            yield None
            return
        client = EmbedderClient(path)
        stack.push_async_callback(client.close)
        yield client


@contextlib.asynccontextmanager
async def closing(client: EmbedderClient) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def own_embedder(settings: Settings) -> AsyncIterator[Path]:
    folder = DataFolder(settings.local.folder)
    folder.open(settings.local.min_free_disk_mb)
    child: Child | None = None
    keeping: asyncio.Task[None] | None = None
    try:
        embedder = LocalEmbedder(folder, settings.local, settings.embedder)
        child = embedder.child
        await child.start()
        keeping = asyncio.get_running_loop().create_task(child.keep(log.warning))
        yield embedder.socket
    finally:
        if keeping is not None:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        if child is not None:
            await child.stop()
        folder.close()


class LocalParts(msgspec.Struct):
    """What `tidegate up` leaves in its data folder for the other commands on this machine."""

    dsn: str = ""
    embedder: str = ""


def reach(settings: Settings) -> Settings:
    """The settings with the database and embedder of the `tidegate up` of this data folder, where none are set."""
    if settings.store.dsn:
        return settings
    file = settings.local.folder / PARTS
    try:
        parts = msgspec.json.decode(file.read_bytes(), type=LocalParts)
    except (OSError, msgspec.MsgspecError):
        raise SettingsError(
            f"There is no database: store.dsn is empty, and no `tidegate up` has run with the data folder {settings.local.folder}.",
            hint="Set store.dsn, or local.data to the folder of the `tidegate up` that is meant.",
        ) from None
    return with_parts(settings, parts)


def with_parts(settings: Settings, parts: LocalParts) -> Settings:
    embedder = settings.embedder
    if parts.embedder and embedder.socket is None:
        embedder = embedder.model_copy(update={"socket": Path(parts.embedder)})
    store = settings.store.model_copy(update={"dsn": parts.dsn or settings.store.dsn})
    return settings.model_copy(update={"store": store, "embedder": embedder})


@contextlib.asynccontextmanager
async def open_store(settings: Settings) -> AsyncIterator[Postgres]:
    store = Postgres(settings.store)
    try:
        yield store
    finally:
        await store.close()


def make_passages(settings: Settings) -> PassageStore | None:
    """Where passages are if not in the database. Raises SettingsError where the package for it is not installed."""
    if not settings.qdrant.url:
        return None
    try:
        from tidegate.stores.systems.qdrant import Qdrant
    except ImportError as error:
        if error.name != "qdrant_client":
            raise
        raise SettingsError("qdrant.url is set, but the package qdrant-client is not installed.", hint="pip install 'tidegate[qdrant]'") from None
    return Qdrant(settings.qdrant)


@contextlib.asynccontextmanager
async def open_passages(settings: Settings) -> AsyncIterator[PassageStore]:
    """Documents and passages: in Qdrant where `[qdrant]` is set, else in the database."""
    store = make_passages(settings) or Postgres(settings.store)
    try:
        yield store
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def key_store(settings: Settings) -> AsyncIterator[KeyStore]:
    """The keys, for `tidegate keys`."""
    async with open_store(reach(settings)) as store:
        yield store


def write_private(file: Path, content: bytes) -> None:
    """A file that only its owner reads."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
        out.write(content)
