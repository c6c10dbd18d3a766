"""From what psycopg raises to what the caller of a store hears: StoreDown with the way out, never a password."""

from __future__ import annotations

import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict

from tidegate.core.errors import SettingsError, StoreDown, TidegateError

_OTHER_SCHEMA = (
    errors.UndefinedTable, errors.UndefinedColumn, errors.InvalidSchemaName, errors.UndefinedObject, errors.UndefinedFunction,
)  # fmt: skip


def where(dsn: str) -> str:
    """The database a DSN names, without user and password: `db at /run/pg:5432`."""
    try:
        parts = conninfo_to_dict(dsn)
    except psycopg.Error:
        return "the database of store.dsn (which cannot be read)"
    host = parts.get("host") or parts.get("hostaddr") or "the default socket"
    return f"{parts.get('dbname') or 'the default database'} at {host}:{parts.get('port') or 5432}"


def check_dsn(dsn: str) -> None:
    """Raises SettingsError where libpq cannot read a DSN. What libpq says of it quotes the DSN, password included, so it is not told."""
    try:
        conninfo_to_dict(dsn)
    except psycopg.Error:
        raise SettingsError(
            "store.dsn cannot be read as a PostgreSQL DSN.",
            hint="Write postgresql://USER:PASSWORD@HOST:5432/DATABASE (special characters as %XX), or host=HOST dbname=DATABASE.",
        ) from None


def first_line(error: BaseException) -> str:
    """What PostgreSQL said, in one line. Its primary message carries no values of a statement."""
    diag = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    return diag or (str(error).strip().splitlines() or [type(error).__name__])[0]


def translate(error: psycopg.Error, dsn: str) -> TidegateError:
    """StoreDown where trying later, or mending the database, helps; else a TidegateError: the value itself was refused."""
    place, said = where(dsn), first_line(error)
    if isinstance(error, errors.QueryCanceled):
        return StoreDown(f"A statement took too long at {place}.", hint="Raise store.statement_timeout_s, or look at the database's load.")
    if isinstance(error, _OTHER_SCHEMA):
        return StoreDown(f"The schema at {place} is not this version's: {said}.", hint="Run `tidegate migrate`.")
    if isinstance(error, (psycopg.DataError, psycopg.IntegrityError)):
        return TidegateError(f"The database at {place} refused a value: {said}.", hint="This is a fault in Tidegate: please report it.")
    hint = "Is PostgreSQL running there, and do store.dsn and its rights fit?"
    return StoreDown(f"The database {place} does not work: {said}.", hint=hint)
