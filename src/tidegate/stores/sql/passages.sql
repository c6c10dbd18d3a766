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
select c.index_version, c.fingerprint, p.id, d.source, d.title, p.text, least(1, greatest(0, -best.distance))::float8 as score, p.page,
       p.tags::text, p.boxes::text
from (values (1)) as once (row)
left join tidegate.collections as c on c.name = %(collection)s
left join best on true
left join tidegate.passages as p on p.collection = %(collection)s and p.id = best.id
left join tidegate.documents as d on d.id = p.document_id
order by best.distance, best.id;

-- part: partly
-- BM25 of the words that are read: from the rarest on, as many as `most` postings hold, and the rarest in any case.
collection as materialized (
    select index_version, worded::float8 as worded, 0.9::float8 * greatest(worded, 1) / greatest(words_total, 1) as by_length
    from tidegate.collections where name = %(collection)s
), asked as materialized (
    select words.term, ln(1 + (worded - passages + 0.5) / (passages + 0.5)) as weight,
           2.2::float8 * ln(1 + (worded - passages + 0.5) / (passages + 0.5)) as most,
           sum(passages) over rarest <= %(most)s or row_number() over rarest = 1 as is_read
    from tidegate.words, collection
    where words.term = any(%(terms)s::bigint[])
    window rarest as (order by passages, words.term)
), weights as materialized (
    select coalesce(sum(weight), 0) + (cardinality(%(terms)s::bigint[]) - count(*))
               * (select ln(1 + (greatest(worded, 1) - 0.5) / 1.5) from collection) as whole,
           count(*) filter (where not is_read) as unread
    from asked
), partly as materialized (
    select posting >> 24 as number, sum(weight) as held,
           sum(most * (posting & 255)::float8 / ((posting & 255)::float8 + 0.3::float8 + by_length * ((posting >> 8) & 65535)::float8)) as score
    from collection, asked
    cross join lateral (select posting from tidegate.postings where postings.term = asked.term offset 0) as one
    where asked.is_read
    group by 1
)

-- part: worded
-- Words that were not read count where a passage is good without them; then each of the best as it is quoted: nearness, BM25, share of the weight.
whole as (
    select best.number, best.score + coalesce(common.score, 0) as score, best.held + coalesce(common.held, 0) as held
    from best
    left join lateral (
        select sum(weight) as held,
               sum(most * (posting & 255)::float8 / ((posting & 255)::float8 + 0.3::float8 + by_length * ((posting >> 8) & 65535)::float8)) as score
        from collection, asked
        cross join lateral (
            select posting from tidegate.postings
            where postings.term = asked.term and posting >= best.number << 24 and posting < (best.number + 1) << 24
            offset 0
        ) as one
        where not asked.is_read
    ) as common on (select unread from weights) > 0
    order by score desc, number
    limit %(k)s
)
select c.index_version, (select count(*) from (select from partly limit %(walk)s + 1) as walked), p.id, d.source, d.title, p.text,
       least(1, greatest(0, -(p.embedding <#> %(vector)s::halfvec)))::float8 as nearness, p.page, p.tags::text, p.boxes::text,
       whole.score, whole.held / (select whole from weights)
from (values (1)) as once (row)
left join collection as c on true
left join whole on true
left join tidegate.passages as p on p.collection = %(collection)s and p.number = whole.number
left join tidegate.documents as d on d.id = p.document_id
order by whole.score desc, p.id;

-- name: find_exact
-- The k nearest passages that fit, by inner product of unit vectors, which is cosine similarity: all that fit are compared.
with best as materialized (
    select p.id, (p.embedding <#> %(vector)s::halfvec) + 0 as distance  -- + 0: an order that no graph can give
    from tidegate.passages as p
    where {{fits}}
    order by distance, p.id
    limit %(k)s
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

-- name: find_words
-- The k passages that fit with the most weight of the words that are asked for, by BM25: from the best on, until enough fit or `walk` were looked at.
with {{partly}}, best as materialized (
    select near.number, near.score, near.held
    from (select number, score, held from partly order by score desc, number limit %(walk)s) as near
    cross join lateral (select from tidegate.passages as p where p.number = near.number and {{fits}} offset 0) as fitting
    order by near.score desc, near.number
    limit (select case when unread > 0 then greatest(%(k)s, %(again)s) else %(k)s end from weights)
), {{worded}}

-- name: find_words_fitting
-- The same from the other end: all that fit, and of these the best.
with {{partly}}, best as materialized (
    select partly.number, partly.score, partly.held
    from tidegate.passages as p join partly on partly.number = p.number
    where {{fits}}
    order by partly.score desc, partly.number
    limit (select case when unread > 0 then greatest(%(k)s, %(again)s) else %(k)s end from weights)
), {{worded}}

-- name: see_one_state
-- First in a transaction: all of its searches see the collection as it is now.
set transaction isolation level repeatable read, read only;

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

-- name: give_memory
-- For the connection that builds indexes: the memory that a graph wants, but no more than the database has for its pages. On disk it takes far longer.
select set_config('maintenance_work_mem', greatest(
    pg_size_bytes(current_setting('maintenance_work_mem')), least(%(wanted)s::bigint, pg_size_bytes(current_setting('shared_buffers')))
) / 1024 || 'kB', false);

-- name: build_alone
-- For the connection that builds indexes: without workers, which need shared memory.
select set_config('max_parallel_maintenance_workers', '0', false);

-- name: index_sizes
-- A collection's usable indexes by name, with their bytes on disk.
select x.relname::text, pg_relation_size(x.oid)
from pg_index as i join pg_class as x on x.oid = i.indexrelid
where i.indrelid = to_regclass('tidegate.passages_' || substr(md5(%(collection)s), 1, 16)) and i.indisvalid
order by x.relname;

-- name: tag_names
-- The names of all tags that a passage of the collection carries.
select distinct jsonb_object_keys(p.tags) from tidegate.passages as p where p.collection = %(collection)s;

-- name: build_progress
-- How far an index is that is built now.
select p.phase, greatest(p.tuples_done, p.blocks_done), greatest(p.tuples_total, p.blocks_total)
from pg_stat_progress_create_index as p join pg_class as x on x.oid = p.index_relid
where x.relname = %(index)s;
