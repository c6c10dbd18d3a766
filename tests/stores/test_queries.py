"""Queries have a name and a sentence each, and lie in one place."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

import tidegate.stores
from tidegate.core.errors import SettingsError, StoreDown, TidegateError
from tidegate.stores.down import translate, where
from tidegate.stores.migrate import migrate
from tidegate.stores.queries import parse, queries
from tidegate.stores.settings import StoreSettings
from tidegate.stores.systems.postgres import Postgres

ROOM = Path(tidegate.stores.__file__).parent


def test_every_query_has_a_name_and_a_sentence() -> None:
    """Nothing in the files stands outside a named query; each sentence ends like one."""
    for file in (ROOM / "sql").glob("*.sql"):
        text = file.read_text()
        found = parse(text)
        assert text.startswith(("-- name: ", "-- part: "))
        assert len(found) == text.count("-- name:")
        assert not any(b"{{" in query.sql for query in found)
        for query in found:
            assert query.sentence.endswith("."), query.name
            assert query.sql.endswith(b";"), query.name


def test_every_query_is_used_and_no_other_sql_is_hidden_in_code() -> None:
    """Names in code and names in files are the same."""
    code = "".join(file.read_text() for file in (ROOM / "systems" / "postgres.py", ROOM / "passages.py", ROOM / "files.py", ROOM / "words.py"))
    used = set(re.findall(r'"([a-z]+(?:_[a-z]+)+)"', code))
    assert set(queries()) <= used
    assert not re.search(r"insert into|delete from|update tidegate", code)


def test_a_file_may_hold_many_queries() -> None:
    """In the order of the file."""
    assert [query.name for query in parse("-- name: a\n-- A.\nselect 1;\n\n-- name: b\n-- B.\nselect 2;\n")] == ["a", "b"]


def test_queries_of_a_file_may_share_a_part() -> None:
    """It stands in each of them, and is none itself."""
    part = "-- part: fits\n-- What fits.\na = 1\n  and b = 2\n\n"
    text = part + "-- name: a\n-- A.\nselect 1 where {{fits}};\n\n-- name: b\n-- B.\nselect 2 where {{fits}};\n"
    shared = b" where a = 1\n  and b = 2;"
    assert [query.sql for query in parse(text)] == [b"select 1" + shared, b"select 2" + shared]


@pytest.mark.parametrize(
    ("dsn", "place"),
    [
        ("postgres://u:geheim@db.example:5433/main", "main at db.example:5433"),
        ("host=/run/pg dbname=tidegate password=geheim", "tidegate at /run/pg:5432"),
        ("", "the default database at the default socket:5432"),
        ("postgres://[geheim", "the database of store.dsn (which cannot be read)"),
    ],
)
def test_a_place_is_named_without_its_password(dsn: str, place: str) -> None:
    """In errors and logs."""
    assert where(dsn) == place


def test_errors_say_the_way_out() -> None:
    """Schema missing: migrate. Connection lost: is it running. A value refused: a fault of ours, and not StoreDown."""
    assert "migrate" in (translate(psycopg.errors.UndefinedTable("x"), "").hint or "")
    assert "running" in (translate(psycopg.OperationalError("x"), "").hint or "")
    assert "statement_timeout_s" in (translate(psycopg.errors.QueryCanceled("x"), "").hint or "")
    assert isinstance(translate(psycopg.errors.DiskFull("x"), ""), StoreDown)
    refused = translate(psycopg.errors.UntranslatableCharacter("x"), "")
    assert type(refused) is TidegateError


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://u:geheim@[::bad/x", "postgresql://u:geheim%zz@h/x", "postgresql://u:geheim@h/x?bogus=1", "mysql://u:geheim@h/x",
        "host=h password='geheim", "geheim",
    ],
)
@pytest.mark.parametrize("use", [migrate, lambda dsn: Postgres(StoreSettings(dsn=dsn))])
def test_a_dsn_that_cannot_be_read_is_refused_without_being_quoted(dsn: str, use: Callable[[str], object]) -> None:
    """libpq quotes a broken DSN in its errors, which end in logs and /health: it is refused before, in words of ours."""
    with pytest.raises(SettingsError, match=r"store\.dsn") as caught:
        use(dsn)
    assert "geheim" not in f"{caught.value} {caught.value.hint} {caught.value.__cause__}"
