-- part: fits
-- The passages that a filter lets pass; what it does not name is folded away when the statement is planned.
p.collection = %(collection)s
  and (%(facet)s::text is null or p.tags ->> %(facet)s::text = %(facet_value)s::text)
  and (%(tags)s::jsonb is null or p.tags @> %(tags)s::jsonb)
  and (%(since)s::float8 is null or p.dated_at >= to_timestamp(%(since)s::float8))
  and (%(until)s::float8 is null or p.dated_at <= to_timestamp(%(until)s::float8))
  and (%(min_confidence)s::real = 0 or p.confidence >= %(min_confidence)s::real)
  and (%(superseded)s::boolean or not p.superseded)

-- part: quoted
-- The collection's state, and beside it each passage of `best` as it is quoted; one row with nothing beside it where there is none.
select c.index_version, p.id, d.source, d.title, p.text, least(1, greatest(0, -best.distance))::float8 as score, p.page, p.tags::text,
       p.boxes::text
from (values (1)) as once (row)
left join tidegate.collections as c on c.name = %(collection)s
left join best on true
left join tidegate.passages as p on p.collection = %(collection)s and p.id = best.id
left join tidegate.documents as d on d.id = p.document_id
order by best.distance, best.id;

-- name: find_exact
-- The k nearest passages that fit, by inner product of unit vectors, which is cosine similarity: all that fit are compared.
with near as materialized (
    select p.id, p.embedding <#> %(vector)s::halfvec as distance
    from tidegate.passages as p
    where {{fits}}
), best as (
    select id, distance from near order by distance, id limit %(k)s
)
{{quoted}}

-- name: find_by_graph
-- The k nearest passages that fit, as the graph of neighbours gives them: perhaps not all of them, and perhaps fewer.
with best as materialized (
    select p.id, p.embedding <#> %(vector)s::halfvec as distance
    from tidegate.passages as p
    where {{fits}}
    order by p.embedding <#> %(vector)s::halfvec
    limit %(k)s
)
{{quoted}}

-- name: estimate_fitting
-- How many passages fit, as the planner takes it: from its statistics, without looking at one.
explain (format json)
select 1
from tidegate.passages as p
where {{fits}};

-- name: collection_state
-- A collection's index version, its facets, and whether it has a graph that can be used.
select c.index_version, c.facets, exists (
    select from pg_index as i join pg_class as x on x.oid = i.indexrelid
    where i.indrelid = to_regclass('tidegate.passages_' || substr(md5(c.name), 1, 16)) and i.indisvalid
      and x.relam = (select oid from pg_am where amname = 'hnsw')
) as graph
from tidegate.collections as c
where c.name = %(collection)s;

-- name: list_collections
-- All that were ever ingested into, by name.
select name from tidegate.collections order by name;

-- name: set_facets
-- The tags that have an index of their own.
insert into tidegate.collections (name, changes, index_version, facets) values (%(collection)s, 0, '0', %(facets)s)
on conflict (name) do update set facets = excluded.facets;

-- name: collection_indexes
-- A collection's facets, its partition's usable indexes by name, and how many passages it has, as the last count of statistics was.
select coalesce((select facets from tidegate.collections where name = %(collection)s), '{}'),
       array(select x.relname::text from pg_index as i join pg_class as x on x.oid = i.indexrelid where i.indrelid = part.oid and i.indisvalid),
       greatest(part.reltuples, 0)::bigint
from pg_class as part
where part.oid = to_regclass('tidegate.passages_' || substr(md5(%(collection)s), 1, 16));

-- name: build_progress
-- How far an index is that is built now.
select p.phase, greatest(p.tuples_done, p.blocks_done), greatest(p.tuples_total, p.blocks_total)
from pg_stat_progress_create_index as p join pg_class as x on x.oid = p.index_relid
where x.relname = %(index)s;
