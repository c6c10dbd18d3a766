"""VectorStore with filters: by time, confidence and tags, without superseded documents; and in PostgreSQL, the way that a search goes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.document import NewPassage
from tidegate.core.errors import BadRequest, NotFound
from tidegate.core.search import Filter
from tidegate.stores import passages as ways
from tidegate.stores.migrate import migrate
from tidegate.stores.settings import StoreSettings
from tidegate.stores.systems.memory import Memory
from tidegate.stores.systems.postgres import Postgres

from .test_documents import Store, a_document, axis, texts


@pytest.fixture
def store(passage_store: Store) -> Store:
    return passage_store


DAY_S = 86_400.0


async def names(store: Store, wanted: Filter, k: int = 99) -> list[str]:
    """The sources found, sorted."""
    return sorted({passage.document for passage in (await store.search("c", axis(0)[0], k, wanted)).passages})


async def test_documents_are_found_by_their_date(store: Store) -> None:
    """Both ends of a time are in it; without a date a document is of the time of its ingest."""
    for day in (1, 2, 3):
        await store.replace_document(a_document(f"{day}", dated_unix_s=day * DAY_S), texts("x"), axis(0))
    await store.replace_document(a_document("now"), texts("x"), axis(0))
    assert await names(store, Filter(since_unix_s=2 * DAY_S, until_unix_s=3 * DAY_S)) == ["2", "3"]
    assert await names(store, Filter(until_unix_s=2 * DAY_S)) == ["1", "2"]
    assert await names(store, Filter(since_unix_s=1_700_000_000)) == ["now"]


async def test_documents_are_found_by_their_confidence(store: Store) -> None:
    """At least what is asked for."""
    for confidence in (0.25, 0.5, 1.0):
        await store.replace_document(a_document(f"{confidence}", confidence=confidence), texts("x"), axis(0))
    assert await names(store, Filter(min_confidence=0.5)) == ["0.5", "1.0"]


async def test_a_superseded_document_is_found_where_it_is_asked_for(store: Store) -> None:
    """Whichever of the two came first; and it is quoted again when its successor goes or no longer says so."""
    await store.replace_document(a_document("old"), texts("x"), axis(0))
    await store.replace_document(a_document("new", supersedes=("old", "older")), texts("y"), axis(0))
    await store.replace_document(a_document("older"), texts("z"), axis(0))
    assert await names(store, Filter()) == ["new"]
    assert await names(store, Filter(superseded=True)) == ["new", "old", "older"]
    assert {document.source: document.superseded_by for document in await store.list_documents("c")} == {
        "new": None, "old": "new", "older": "new",
    }
    await store.replace_document(a_document("new", supersedes=("older",)), texts("y"), axis(0))
    assert await names(store, Filter()) == ["new", "old"]
    await store.delete_document("c", "new")
    assert await names(store, Filter()) == ["old", "older"]


async def test_what_was_found_names_its_index_version(store: Store) -> None:
    """Also where nothing was found."""
    await store.replace_document(a_document(), texts("x"), axis(0))
    version = await store.index_version("c")
    assert (await store.search("c", axis(0)[0], 1)).index_version == version
    assert (await store.search("c", axis(0)[0], 1, Filter({"no": "such"}))).index_version == version
    assert (await store.search("none", axis(0)[0], 1)).index_version == "0"


FILTERS = st.builds(
    Filter,
    tags=st.dictionaries(st.sampled_from(["d", "p"]), st.sampled_from(["0", "1", "2"])),
    since_unix_s=st.none() | st.sampled_from([0.0, 3 * DAY_S, 9 * DAY_S]),
    until_unix_s=st.none() | st.sampled_from([0.0, 5 * DAY_S, 9 * DAY_S]),
    min_confidence=st.sampled_from([0.0, 0.5, 1.0]),
    superseded=st.booleans(),
)


@pytest.fixture
def two_stores(clean_dsn: str) -> Iterator[tuple[asyncio.Runner, Postgres, Memory]]:
    """The same hundred documents in both systems; PostgreSQL has an index for the tag d and a graph."""
    with asyncio.Runner() as runner:
        postgres, memory = Postgres(StoreSettings(dsn=clean_dsn)), Memory()
        rng = np.random.default_rng(1)

        async def fill() -> None:
            for number in range(100):
                vectors = rng.standard_normal((2, 384)).astype(np.float32)
                vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16).astype(np.float32)
                document = a_document(
                    f"{number:02}", tags={"d": f"{number % 3}", "p": f"{number % 4}"}, dated_unix_s=number % 10 * DAY_S,
                    confidence=number % 5 / 4, supersedes=(f"{number - 1:02}",) if number % 7 == 0 else (),
                )
                for store in (postgres, memory):
                    await store.replace_document(document, [NewPassage("a"), NewPassage("b", tags={"p": "2"})], vectors)
            await postgres.build_indexes("c", facets=("d",), graph=True)

        runner.run(fill())
        yield runner, postgres, memory
        runner.run(postgres.close())


@pytest.mark.parametrize("exact_most", [0, 20_000], ids=["by-graph", "exact"])
def test_a_filter_gives_what_comparing_everything_gives(
    two_stores: tuple[asyncio.Runner, Postgres, Memory], exact_most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never fewer passages than fit, whatever the filter and the way; exact, they are the very ones."""
    runner, postgres, memory = two_stores
    monkeypatch.setattr(ways, "EXACT_MOST", exact_most)
    rng = np.random.default_rng(2)
    graph = False

    @given(wanted=FILTERS, k=st.integers(1, 40))
    def check(wanted: Filter, k: int) -> None:
        nonlocal graph
        vector = rng.standard_normal(384).astype(np.float32)
        vector /= np.linalg.norm(vector)
        found = runner.run(postgres.search("c", vector, k, wanted))
        expected = runner.run(memory.search("c", vector, k, wanted))
        assert len(found.passages) == len(expected.passages)
        graph |= found.way == "graph"
        if exact_most:
            assert found.way == "exact"
            assert [passage.score for passage in found.passages] == pytest.approx([passage.score for passage in expected.passages], abs=2e-3)

    check()
    assert graph == (exact_most == 0)


async def test_too_few_from_the_graph_are_looked_for_again(postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that asks for more than fit goes through all: the graph alone cannot know."""
    monkeypatch.setattr(ways, "EXACT_MOST", 0)
    await postgres.replace_document(a_document(), texts("x", "y"), axis(0, 1))
    await postgres.build_indexes("c", graph=True)
    assert (await postgres.search("c", axis(0)[0], 1)).way == "graph"
    found = await postgres.search("c", axis(0)[0], 5)
    assert (found.way, len(found.passages)) == ("graph_then_exact", 2)
    assert (await postgres.search("c", axis(0)[0], 1, exact=True)).way == "exact"


async def test_the_plan_of_a_search_is_told(postgres: Postgres) -> None:
    """The way first, then what the database did; a facet goes by its own index, without reading the table."""
    for number in range(400):
        tags = {"d": f"{number % 20}"}
        await postgres.replace_document(a_document(f"{number}", tags=tags), texts("x", "y", "z"), axis(number % 384, 1, 2))
    await postgres.build_indexes("c", facets=("d",))
    lines = await postgres.explain("c", axis(0)[0], 3, Filter({"d": "3"}))
    assert "all that fit are compared" in lines[0]
    assert any("Index Only Scan" in line and "facet" in line for line in lines), lines


async def test_what_indexes_a_collection_has_is_told(postgres: Postgres) -> None:
    """By name, with their size, and which of them this build made; a second one makes none."""
    await postgres.replace_document(a_document(collection="told", tags={"d": "1"}), texts("x"), axis(0))
    for built in (True, False):
        states = await postgres.build_indexes("told", facets=("d",), graph=True)
        made = {state.what: state.built for state in states}
        assert (made["facet d"], made["graph of neighbours"]) == (built, built)
        assert not made["as every collection has"]
        assert all(state.bytes > 0 for state in states)


async def test_a_graph_is_built_with_as_much_memory_as_it_wants(empty_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But with no more than the database has for its pages."""
    migrate(empty_dsn)
    monkeypatch.setattr(ways, "GRAPH_BYTES", 2**40)
    store = Postgres(StoreSettings(dsn=empty_dsn))
    await store.replace_document(a_document(), texts("x", "y"), axis(0, 1))
    with psycopg.connect(empty_dsn, autocommit=True) as link:
        link.execute(f"alter database {link.info.dbname} set maintenance_work_mem = '1MB'".encode())
        link.execute("create table public.noted (memory text)")
        link.execute("""
            create function public.note() returns event_trigger language plpgsql as
            $$ begin insert into public.noted values (current_setting('maintenance_work_mem')); end $$
        """)
        link.execute("create event trigger noted on ddl_command_start when tag in ('CREATE INDEX') execute function public.note()")
        await store.build_indexes("c", graph=True)
        ((pages, build),) = link.execute(
            "select pg_size_bytes(current_setting('shared_buffers')), (select max(pg_size_bytes(memory)) from public.noted)"
        )
    await store.close()
    assert build == pages > 2**20


async def test_a_graph_is_built_where_workers_have_no_memory_to_share(empty_dsn: str) -> None:
    """As in a container, which has 64 MB of it: then without workers."""
    migrate(empty_dsn)
    store = Postgres(StoreSettings(dsn=empty_dsn))
    await store.replace_document(a_document(), texts("x", "y"), axis(0, 1))
    with psycopg.connect(empty_dsn, autocommit=True) as link:
        ((part,),) = link.execute("select tidegate.passages_partition('c')")
        link.execute(f"alter table tidegate.{part} set (parallel_workers = 2)".encode())
        link.execute(f"alter database {link.info.dbname} set maintenance_work_mem = '2047GB'".encode())
        link.execute(f"alter database {link.info.dbname} set min_parallel_table_scan_size = 0".encode())
    states = await store.build_indexes("c", graph=True)
    await store.close()
    assert [state.built for state in states if state.what == "graph of neighbours"] == [True]


async def test_a_facet_that_no_passage_carries_is_refused_by_name(postgres: Postgres) -> None:
    """A slip of the pen would build an index that nothing uses, and drop the one that is used."""
    await postgres.replace_document(a_document(tags={"product": "1"}), texts("x"), axis(0))
    await postgres.build_indexes("c", facets=("product",))
    with pytest.raises(BadRequest, match="carries a tag 'prodct'") as refused:
        await postgres.build_indexes("c", facets=("prodct",))
    assert "'product'" in str(refused.value.hint)
    assert any(state.what == "facet product" for state in await postgres.build_indexes("c"))


async def test_a_collection_that_is_not_there_is_refused_by_name(store: Store) -> None:
    """Its indexes would be complete, and nothing would ever be found in it; only a search of a request takes it for an empty one."""
    await store.replace_document(a_document(), texts("x"), axis(0))
    await store.build_indexes("c")
    with pytest.raises(NotFound, match="There is no collection 'cc'") as refused:
        await store.build_indexes("cc", facets=("d",))
    assert "Did you mean 'c'?" in str(refused.value.hint)
    with pytest.raises(NotFound, match="There is no collection 'cc'"):
        await store.explain("cc", axis(0)[0], 3)
    assert await store.index_version("cc") == "0"


async def test_tags_that_no_index_can_hold_are_refused(store: Store) -> None:
    """By name, before anything is stored."""
    with pytest.raises(Exception, match="tags"):
        await store.replace_document(a_document(tags={"t": "v" * 2000}), texts("x"), axis(0))
    assert await store.list_documents("c") == []


async def test_passages_of_the_first_schema_come_along(empty_dsn: str) -> None:
    """A database of before is brought up to date with all that it holds, and each passage is dated as its document was ingested."""
    migrate(empty_dsn)
    store = Postgres(StoreSettings(dsn=empty_dsn))
    await store.replace_document(a_document(), texts("x"), axis(0))
    await store.close()
    with psycopg.connect(empty_dsn, autocommit=True) as link:
        link.execute("create table tidegate.as_before (like tidegate.passages including defaults)")
        link.execute("insert into tidegate.as_before select * from tidegate.passages")
        link.execute("drop table tidegate.passages")
        link.execute("alter table tidegate.as_before rename to passages")
        link.execute("alter table tidegate.passages drop dated_at, drop confidence, drop superseded, add primary key (id)")
        link.execute("alter table tidegate.passages drop number, drop words, drop words_digest")
        for name, on in (("document", "(document_id)"), ("collection", "(collection)"), ("tags", "using gin (tags jsonb_path_ops)")):
            link.execute(f"create index passages_{name} on tidegate.passages {on}".encode())
        link.execute("update tidegate.documents set ingested_at = to_timestamp(86400)")
        link.execute("delete from tidegate._yoyo_migration where migration_id in ('0004-search', '0005-words')")
    assert migrate(empty_dsn) == ["0004-search", "0005-words"]
    found = await store.search("c", axis(0)[0], 3, Filter(until_unix_s=DAY_S))
    assert [passage.text for passage in found.passages] == ["x"]
    await store.close()
