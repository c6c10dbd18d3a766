"""Bring the database's schema to this version: `sql/migrations/*.sql`, applied by yoyo, once each, in the order of their names.

Three things are ours, because yoyo's own fall short here:

- The connection: yoyo reads a DSN as a URL and loses libpq's other forms; we hand the DSN to psycopg as it is.
- The lock: yoyo's is a committed row, which a killed process leaves behind for ever. We hold a PostgreSQL advisory lock, which ends
  with the connection, and clear the row when we have it.
- The set-up: yoyo provokes errors to find things out; they would stand in the database's log at every start.
"""

from __future__ import annotations

import glob
import os
import socket
import uuid
from datetime import UTC, datetime
from importlib import resources
from typing import Any

import psycopg
from yoyo import read_migrations
from yoyo.backends.core.postgresql import PostgresqlPsycopgBackend
from yoyo.connections import parse_uri

from tidegate.core.errors import SettingsError, StoreDown
from tidegate.stores.down import check_dsn, first_line, translate, where

#: Any number that no other program on the same database takes for its advisory lock: "tidegate" in ASCII.
LOCK = int.from_bytes(b"tidegate") >> 1
#: Seconds to wait for another process that migrates. Building indexes over large tables takes a while.
WAIT_S = 120


class _Backend(PostgresqlPsycopgBackend):  # type: ignore[misc]  # yoyo ships no types
    create_lock_table_sql = PostgresqlPsycopgBackend.create_lock_table_sql.replace("CREATE TABLE", "CREATE TABLE IF NOT EXISTS")

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        # The name stands in yoyo's pickled cache key only; the password does not belong there.
        super().__init__(parse_uri("postgresql+psycopg:///tidegate"), "_yoyo_migration")

    def connect(self, dburi: object) -> psycopg.Connection[Any]:
        return psycopg.connect(self._dsn, autocommit=True, connect_timeout=2, application_name="tidegate migrate")

    def copy(self) -> _Backend:
        return type(self)(self._dsn)

    def init_connection(self, connection: psycopg.Connection[Any]) -> None:
        connection.execute("set client_min_messages = warning")
        connection.execute("set search_path to tidegate, public")

    def _check_transactional_ddl(self) -> bool:
        return True

    def get_log_data(self, migration: Any = None, operation: str = "apply") -> dict[str, Any]:
        # yoyo's own asks for the user's name, which fails for a user id without one, as in many containers.
        return {
            "id": str(uuid.uuid4()),
            "migration_id": migration.id if migration else None,
            "migration_hash": migration.hash if migration else None,
            "username": f"uid {os.getuid()}",
            "hostname": socket.gethostname(),
            "created_at_utc": datetime.now(UTC).replace(tzinfo=None),
            "operation": operation,
        }


def migrate(dsn: str) -> list[str]:
    """Apply what is missing; returns the names of the migrations that were applied now. Blocks: call it in a thread of its own.

    Safe to call from several processes at once, and after one was killed in the middle. Raises StoreDown where the database cannot be
    reached or another process migrates for too long, SettingsError where it cannot carry the schema (no pgvector, no rights).
    """
    check_dsn(dsn)
    try:
        backend = _Backend(dsn)
    except psycopg.Error as error:
        raise translate(error, dsn) from error
    try:
        with backend:
            _lock(backend.connection, dsn)
            return _apply(backend)
    except psycopg.errors.InsufficientPrivilege as error:
        raise _refused(error, dsn, "Give store.dsn's user the right to create in the database, or migrate once as its owner.") from error
    except (psycopg.errors.FeatureNotSupported, psycopg.errors.UndefinedFile, psycopg.errors.UndefinedObject) as error:
        raise _refused(error, dsn, "Install the extension pgvector, 0.8 or later, on the database's machine.") from error
    except psycopg.Error as error:
        raise translate(error, dsn) from error


def _lock(connection: psycopg.Connection[Any], dsn: str) -> None:
    """Wait for our turn; the lock ends with the connection, however that ends."""
    connection.execute(f"set lock_timeout = '{WAIT_S}s'".encode())
    try:
        connection.execute("select pg_advisory_lock(%s)", (LOCK,))
    except psycopg.errors.LockNotAvailable as error:
        raise StoreDown(
            f"Another process has been migrating {where(dsn)} for {WAIT_S} s.", hint="Wait for it, or look in pg_stat_activity."
        ) from error


def _apply(backend: _Backend) -> list[str]:
    backend.execute("create schema if not exists tidegate")
    backend.init_database()
    backend.break_lock()  # a row left by a process that was killed: nobody alive holds it, because we have the advisory lock
    folder = resources.files("tidegate.stores") / "sql" / "migrations"
    with resources.as_file(folder) as path, backend.lock():
        missing = backend.to_apply(read_migrations(glob.escape(str(path))))
        backend.apply_migrations(missing)
        return [migration.id for migration in missing]


def _refused(error: psycopg.Error, dsn: str, hint: str) -> SettingsError:
    return SettingsError(f"The database {where(dsn)} cannot carry the schema: {first_line(error)}.", hint=hint)
