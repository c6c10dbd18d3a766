"""Real parts for every room's tests, started once and only where a test asks for them."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from tidegate.local.engine import LocalEngine

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Begun in the background of a script, where shells ignore Ctrl-C for everything below: what is tested must hear it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How wide the terminal is in which the tests were begun is no matter of theirs; pytest-xdist says it to its workers.
os.environ.pop("COLUMNS", None)


# How long an example takes, or is made, depends on what else the machine does: no fact of ours.
hypothesis.settings.register_profile("tidegate", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("tidegate")


@pytest.fixture(scope="session")
def data_home() -> Iterator[Path]:
    """A short folder that other users may enter: PostgreSQL, which never runs as root, lives below it."""
    home = Path(tempfile.mkdtemp(prefix="tg-", dir="/tmp"))
    home.chmod(0o711)
    yield home
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_dsn(data_home: Path) -> Iterator[str]:
    """A fresh database `tidegate` with the extension vector, in the real embedded PostgreSQL, for this test session."""
    from tidegate.local.folder import DataFolder
    from tidegate.local.postgres import Postgres
    from tidegate.local.settings import LocalSettings

    folder = DataFolder(data_home / "shared")
    folder.open(min_free_mb=0)
    postgres = Postgres(folder, LocalSettings(data=str(folder.path), postgres_shared_buffers_mb=32), fsync=False)
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(postgres.start())
        yield postgres.dsn
    finally:
        loop.run_until_complete(postgres.stop())
        loop.close()
        folder.close()


@pytest.fixture(scope="session")
def llama_engine(data_home: Path) -> Iterator[LocalEngine]:
    """The real embedded engine with the packaged model: 4 slots of 2048 tokens."""
    from tidegate.local.engine import LocalEngine
    from tidegate.local.folder import DataFolder
    from tidegate.local.settings import LocalSettings

    folder = DataFolder(data_home / "engine")
    folder.open(min_free_mb=0)
    engine = LocalEngine(folder, LocalSettings(data=str(folder.path)))
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(engine.child.start())
        yield engine
    finally:
        loop.run_until_complete(engine.child.stop())
        loop.close()
        engine.release()
        folder.close()


@pytest.fixture(scope="session")
def llama_url(llama_engine: LocalEngine) -> str:
    """Base URL of the embedded engine, without /v1."""
    return llama_engine.address.url


@pytest.fixture(scope="session")
def llama_key(llama_engine: LocalEngine) -> str:
    """The API key that the embedded engine wants."""
    return llama_engine.address.key


@pytest.fixture(scope="session")
def llama_log(llama_engine: LocalEngine) -> Path:
    """What the embedded engine says of itself."""
    return llama_engine.child.spec.log.path
