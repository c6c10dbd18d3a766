"""The schema comes into the database once, whoever asks and however often."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tidegate.core.errors import SettingsError, StoreDown
from tidegate.stores.migrate import LOCK, migrate

#: Every migration, in the order in which they are applied.
ALL = sorted(path.stem for path in Path(str(resources.files("tidegate.stores") / "sql" / "migrations")).glob("*.sql"))


def test_migrations_are_applied_once(empty_dsn: str) -> None:
    """The first call names what it applied, the second has nothing to do."""
    assert migrate(empty_dsn) == ALL
    assert migrate(empty_dsn) == []


def test_all_tables_are_in_a_schema_of_ours(empty_dsn: str) -> None:
    """A database that is shared with other programs gets nothing into `public` but the extension."""
    migrate(empty_dsn)
    with psycopg.connect(empty_dsn) as link:
        schemas = link.execute(
            "select distinct table_schema from information_schema.tables where table_schema not in ('pg_catalog', 'information_schema')"
        ).fetchall()
    assert schemas == [("tidegate",)]


def test_many_processes_may_migrate_at_once(empty_dsn: str) -> None:
    """Six callers at the same time: one applies, all return."""
    with ThreadPoolExecutor(6) as pool:
        applied = list(pool.map(migrate, [empty_dsn] * 6))
    assert sorted(map(len, applied)) == [0, 0, 0, 0, 0, len(ALL)]


def test_a_url_over_tcp_form_is_understood(empty_dsn: str) -> None:
    """The URL form and libpq's key=value form name the same database."""
    parts = psycopg.conninfo.conninfo_to_dict(empty_dsn)
    assert migrate(make_conninfo(**parts)) == ALL  # key=value
    rest = "&".join(f"{key}={value}" for key, value in parts.items() if key not in ("dbname", "user"))
    assert migrate(f"postgres://{parts['user']}@/{parts['dbname']}?{rest}") == []


def test_a_killed_migration_does_not_stop_the_next_one(empty_dsn: str) -> None:
    """A process killed while it holds the locks leaves yoyo's lock row behind; the next migration goes through at once."""
    migrate(empty_dsn)
    with psycopg.connect(empty_dsn, autocommit=True) as link:
        link.execute("insert into tidegate.yoyo_lock (locked, ctime, pid) values (1, now(), 1)")
        link.execute("delete from tidegate._yoyo_migration")  # and it was not marked yet
    assert migrate(empty_dsn) == ALL


def test_a_killed_process_frees_the_lock(empty_dsn: str, tmp_path: Path) -> None:
    """The lock is the connection's: SIGKILL to its holder lets the next one in."""
    code = f"""
import psycopg, time
link = psycopg.connect({empty_dsn!r}, autocommit=True)
link.execute("select pg_advisory_lock({LOCK})")
print("held", flush=True)
time.sleep(100)
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with ThreadPoolExecutor(1) as pool:
        migrating = pool.submit(migrate, empty_dsn)
        with psycopg.connect(empty_dsn, autocommit=True) as link:
            waits = "select count(*) from pg_locks where locktype = 'advisory' and not granted"
            deadline_ns = time.perf_counter_ns() + 10 * 10**9
            while link.execute(waits).fetchone() == (0,):
                assert time.perf_counter_ns() < deadline_ns
        assert not migrating.done()
        os.kill(holder.pid, signal.SIGKILL)
        assert migrating.result(timeout=30) == ALL
    holder.wait()
    holder.stdout.close()


def test_a_database_that_is_not_there_is_store_down(tmp_path: Path) -> None:
    """The error names the place, gives the way out and holds no password."""
    with pytest.raises(StoreDown) as caught:
        migrate(f"host={tmp_path} dbname=nowhere user=u password=geheim")
    assert str(tmp_path) in caught.value.message
    assert caught.value.hint
    assert "geheim" not in caught.value.message + (caught.value.hint or "")


def test_a_database_without_rights_says_so(empty_dsn: str) -> None:
    """A user that may not create anything is told which right is missing."""
    with psycopg.connect(empty_dsn, autocommit=True) as link:
        name = f"weak_{os.urandom(4).hex()}"
        link.execute(f"create role {name}".encode())
    with pytest.raises(SettingsError, match="permission denied") as caught:
        migrate(make_conninfo(empty_dsn, options=f"-c role={name}"))
    assert "right" in (caught.value.hint or "")
