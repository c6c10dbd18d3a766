"""The systems that the port suites run over, each empty for each test."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tidegate.stores.migrate import migrate
from tidegate.stores.settings import QdrantSettings, StoreSettings
from tidegate.stores.systems.memory import Memory
from tidegate.stores.systems.postgres import Postgres
from tidegate.stores.systems.qdrant import Qdrant

TABLES = "api_keys documents files passages postings words collections flights kept_texts evaluations"


def new_database(postgres_dsn: str) -> str:
    name = f"test_{uuid.uuid4().hex}"
    with psycopg.connect(postgres_dsn, autocommit=True) as link:
        link.execute(f'create database "{name}"'.encode())
    return make_conninfo(postgres_dsn, dbname=name)


@pytest.fixture
def empty_dsn(postgres_dsn: str) -> str:
    """A database of this test's own, without extension or schema."""
    return new_database(postgres_dsn)


@pytest.fixture(scope="session")
def migrated_dsn(postgres_dsn: str) -> str:
    dsn = new_database(postgres_dsn)
    migrate(dsn)
    return dsn


@pytest.fixture
def clean_dsn(migrated_dsn: str) -> str:
    """One database with a schema for all tests; its tables are empty."""
    with psycopg.connect(migrated_dsn, autocommit=True) as link:
        link.execute(("truncate " + ", ".join(f"tidegate.{table}" for table in TABLES.split())).encode())
    return migrated_dsn


@pytest.fixture
async def postgres(clean_dsn: str) -> AsyncIterator[Postgres]:
    store = Postgres(StoreSettings(dsn=clean_dsn))
    yield store
    await store.close()


@pytest.fixture
async def qdrant() -> AsyncIterator[Qdrant]:
    """The client's own memory, which understands what the server does."""
    store = Qdrant(QdrantSettings(url=":memory:"))
    yield store
    await store.close()


@pytest.fixture(params=["memory", "postgres"])
def store(request: pytest.FixtureRequest) -> Memory | Postgres:
    """Each system that serves the port."""
    return Memory() if request.param == "memory" else request.getfixturevalue("postgres")


@pytest.fixture(params=["memory", "postgres", "qdrant"])
def passage_store(request: pytest.FixtureRequest) -> Memory | Postgres | Qdrant:
    """Each system that keeps documents and their passages."""
    return Memory() if request.param == "memory" else request.getfixturevalue(request.param)
