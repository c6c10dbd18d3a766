"""The files that passages were read from, in PostgreSQL: kept, replaced and forgotten in the transaction of their document's passages."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import psycopg
from psycopg.rows import TupleRow

from tidegate.core.document import Box, StoredPassage
from tidegate.stores.clean import clean_text
from tidegate.stores.queries import queries

Link = psycopg.AsyncConnection[TupleRow]


async def put_file(link: Link, document_id: int, file: bytes | None) -> None:
    """The document's file is this one from now on; None: it has none."""
    if file is None:
        await link.execute(queries()["drop_file"].sql, {"document_id": document_id})
    else:
        kept = {"document_id": document_id, "sha256": hashlib.sha256(file).hexdigest(), "bytes": file}
        await link.execute(queries()["put_file"].sql, kept)


class Files:
    """The table of files. `run` does work on a connection of the pool and raises StoreDown."""

    def __init__(self, run: Callable[[Callable[[Link], Awaitable[Any]]], Awaitable[Any]]) -> None:
        self._run = run

    async def stored_passages(self, collection: str, ids: Sequence[str]) -> list[StoredPassage]:
        """Those that are there, in the order of `ids`."""
        wanted = {"collection": clean_text(collection), "ids": [clean_text(id) for id in ids]}
        rows = await self._run(lambda link: _rows(link, "stored_passages", wanted))
        found = {
            id: StoredPassage(id, source, title, text, page, heading, msgspec.json.decode(boxes, type=list[Box]), sha256)
            for id, source, title, text, page, heading, boxes, sha256 in rows
        }
        return [found[id] for id in ids if id in found]

    async def read_file(self, sha256: str) -> bytes | None:
        """None where no document has such a file (any more)."""
        rows = await self._run(lambda link: _rows(link, "read_file", {"sha256": clean_text(sha256)}))
        return bytes(rows[0][0]) if rows else None


async def _rows(link: Link, name: str, parameters: dict[str, Any]) -> list[TupleRow]:
    """In binary: as text, bytes would come as twice as many hex digits."""
    return await (await link.execute(queries()[name].sql, parameters, binary=True)).fetchall()
