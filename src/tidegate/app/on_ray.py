"""`tidegate ingest --on ray`: the same steps on the machines of a Ray cluster. Needs the extra `tidegate[ray]` here and there.

Each worker is an actor that runs the ingest itself over a few files at a time, with a reader, an embedder and a connection of its own; so a document
is stored once however often it is given out, and what a machine that went down had not stored is done again. The cluster is that of RAY_ADDRESS, or
one on this machine. Every machine sees the files under the same paths and reaches the database of the settings, and the embedder at embedder.socket;
with embedder.mode = "in_process" each worker loads the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tidegate.app.collections import embedder_and_passages
from tidegate.app.parts import reach
from tidegate.core.errors import SettingsError
from tidegate.core.ports import Embedder, PassageStore
from tidegate.retrieval.ingest import Given, IngestReport, Progress, finish
from tidegate.retrieval.ingest import ingest as ingest_paths
from tidegate.retrieval.load_child import by_suffix
from tidegate.retrieval.structure import Rules
from tidegate.retrieval.walk import walk
from tidegate.settings import Settings

#: Files that a worker is given at once: enough to keep its embedder busy, few enough that all workers end at about the same time.
FILES_AT_ONCE = 32


async def ingest(
    settings: Settings, paths: Sequence[Path], *, collection: str, given: Given, base: Path | None, prune: bool,
    rules: Rules | None, progress: Callable[[Progress], None],
) -> IngestReport:
    """As `tidegate.retrieval.ingest.ingest`. Raises SettingsError where Ray is not installed, or no cluster is there."""
    ray = _ray()
    began_ns = time.perf_counter_ns()
    settings = reach(settings)
    base = None if base is None else await asyncio.to_thread(base.resolve)
    found = await asyncio.to_thread(walk, list(paths), by_suffix().keys())
    report = IngestReport(skipped=found.skipped, failed=found.failed, pruned=prune)
    await asyncio.to_thread(_connect, ray)
    try:
        await _all(ray, settings, found.files, {"collection": collection, "given": given, "base": base, "rules": rules}, report, progress)
    finally:
        await asyncio.to_thread(ray.shutdown)
    async with embedder_and_passages(settings) as (_, store):
        await finish(report, found.folders, collection, store, base)
    report.seconds = (time.perf_counter_ns() - began_ns) / 1e9
    return report


async def _all(
    ray: Any, settings: Settings, files: list[Path], shared: dict[str, Any], report: IngestReport, progress: Callable[[Progress], None]
) -> None:
    """Files to workers, a few at a time, until all are done."""
    waiting = [files[at : at + FILES_AT_ONCE] for at in range(0, len(files), FILES_AT_ONCE)]
    cores = int(ray.cluster_resources().get("CPU", 1))
    # A worker's process holds the settings; one that was lost is started again, and its files are given to it again.
    actor = ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=3)(_Worker)
    workers = [actor.remote(settings) for _ in range(min(settings.retrieval.ingest_workers or cores, len(waiting)))]
    done = 0

    async def work(worker: Any) -> None:
        nonlocal done
        while waiting:
            batch = waiting.pop(0)
            progress(Progress(done, len(files), str(batch[0]), "reading", report.passages))
            part = msgspec.json.decode(await worker.ingest.remote(batch, shared), type=IngestReport)
            done += len(batch)
            for name in ("stored", "unchanged", "skipped", "failed", "notes"):
                getattr(report, name).extend(getattr(part, name))
            report.passages += part.passages
            progress(Progress(done, len(files), str(batch[-1]), "stored", report.passages))

    async with asyncio.TaskGroup() as group:
        for worker in workers:
            group.create_task(work(worker))


class _Worker:
    """What runs in a process on a machine of the cluster."""

    def __init__(self, settings: Settings) -> None:
        # One file is read at a time: the cluster's other cores have workers of their own.
        retrieval = settings.retrieval.model_copy(update={"ingest_workers": 1})
        self._settings = settings.model_copy(update={"retrieval": retrieval})
        self._open = contextlib.AsyncExitStack()  # as long as the process lives
        self._parts: tuple[Embedder, PassageStore] | None = None

    async def ingest(self, files: list[Path], shared: dict[str, Any]) -> bytes:
        """The report of these files, as JSON."""
        if self._parts is None:
            self._parts = await self._open.enter_async_context(embedder_and_passages(self._settings))
        embedder, store = self._parts
        report = await ingest_paths(files, **shared, embedder=embedder, store=store, settings=self._settings.retrieval, finishing=False)
        return msgspec.json.encode(report)


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise SettingsError("Ray is not installed.", hint="Install it here and on the cluster's machines: pip install 'tidegate[ray]'.") from None
    return ray


def _connect(ray: Any) -> None:
    try:
        ray.init(address=os.environ.get("RAY_ADDRESS") or None, log_to_driver=False, include_dashboard=False, logging_level="warning")
    except (ConnectionError, RuntimeError, ValueError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise SettingsError(f"There is no Ray cluster: {why}", hint="Set RAY_ADDRESS, or unset it for one on this machine.") from None
