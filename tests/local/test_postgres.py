"""The embedded PostgreSQL."""

from __future__ import annotations

import psycopg
import pytest

pytestmark = pytest.mark.local


def test_it_has_pgvector_and_utf8(postgres_dsn: str) -> None:
    """The database is UTF-8, sorts by code point, and knows vectors."""
    with psycopg.connect(postgres_dsn) as connection:
        row = connection.execute("SELECT '[1,2]'::vector <-> '[1,4]', current_setting('server_encoding'), '保险'::text").fetchone()
    assert row == (2.0, "UTF8", "保险")
