"""Named queries: `sql/*.sql`, each with a name and a sentence.

    -- name: get_flight
    -- The record of one flight.
    select ... ;

What several queries of a file share stands at its head as `-- part: NAME` with a sentence, and as {{NAME}} in the queries.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources

import msgspec

_HEAD = re.compile(r"^-- name: (\w+)\n-- (.+)\n", re.MULTILINE)
_PART = re.compile(r"^-- part: (\w+)\n-- .+\n((?:.+\n)+)", re.MULTILINE)


class Query(msgspec.Struct, frozen=True):
    """A query as psycopg takes it (bytes, with `%(name)s` for parameters), and what it is for."""

    name: str
    sentence: str
    sql: bytes


@cache
def queries() -> Mapping[str, Query]:
    """All named queries, by name. Read once."""
    found: dict[str, Query] = {}
    for file in sorted((resources.files("tidegate.stores") / "sql").iterdir(), key=lambda file: file.name):
        if file.name.endswith(".sql"):
            for query in parse(file.read_text(encoding="utf-8")):
                if query.name in found:
                    raise ValueError(f"Two queries are named {query.name!r} (the second one in {file.name}).")
                found[query.name] = query
    return found


def parse(text: str) -> list[Query]:
    """The queries of one file, in its order, with the parts that they share in their places."""
    for part in _PART.findall(text):
        text = text.replace("{{" + part[0] + "}}", part[1].strip())
    heads = list(_HEAD.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    return [Query(head[1], head[2], text[head.end() : end].strip().encode()) for head, end in zip(heads, ends, strict=True)]
