-- name: document_sha
-- The digest under which a document was stored last.
select sha256 from tidegate.documents where collection = %(collection)s and source = %(source)s;

-- name: put_document
-- Store or replace a document's head; locks its row until the transaction ends, so that two writers of one document take turns.
insert into tidegate.documents (collection, source, title, sha256, size_bytes, tags)
values (%(collection)s, %(source)s, %(title)s, %(sha256)s, %(size_bytes)s, %(tags)s::jsonb)
on conflict (collection, source) do update
    set title = excluded.title, sha256 = excluded.sha256, size_bytes = excluded.size_bytes, tags = excluded.tags,
        version = documents.version + 1, ingested_at = now()
returning id, version;

-- name: passage_ids
-- The ids of a document's passages.
select id from tidegate.passages where document_id = %(document_id)s;

-- name: drop_passages
-- Delete passages of a document by id.
delete from tidegate.passages where document_id = %(document_id)s and id = any(%(ids)s);

-- name: put_passage
-- Store a passage; one that is there already is only touched where something about it changed.
insert into tidegate.passages (id, document_id, collection, ordinal, text, page, heading, tokens, tags, boxes, embedding)
values (%(id)s, %(document_id)s, %(collection)s, %(ordinal)s, %(text)s, %(page)s, %(heading)s, %(tokens)s, %(tags)s::jsonb,
        %(boxes)s::jsonb, %(embedding)s::halfvec)
on conflict (id) do update
    set ordinal = excluded.ordinal, page = excluded.page, heading = excluded.heading, tokens = excluded.tokens, tags = excluded.tags,
        boxes = excluded.boxes, embedding = excluded.embedding
    where (passages.ordinal, passages.page, passages.heading, passages.tokens, passages.tags, passages.boxes, passages.embedding)
          is distinct from (excluded.ordinal, excluded.page, excluded.heading, excluded.tokens, excluded.tags, excluded.boxes,
                            excluded.embedding);

-- name: delete_document
-- Delete a document and, with it, its passages.
delete from tidegate.documents where collection = %(collection)s and source = %(source)s returning id;

-- name: list_documents
-- Documents by collection and source, with the number of their passages; a null collection means all.
select collection, source, title, sha256, size_bytes, tags::text, version,
       (select count(*) from tidegate.passages where document_id = documents.id) as passages,
       extract(epoch from ingested_at)::float8 as ingested_unix_s
from tidegate.documents
where %(collection)s::text is null or collection = %(collection)s
order by collection collate "C", source collate "C";

-- name: change_collection
-- Give a collection a new index version, because its content changes in this transaction.
insert into tidegate.collections (name, changes, index_version)
values (%(collection)s, 1, '1-' || %(random)s)
on conflict (name) do update
    set changes = collections.changes + 1, index_version = (collections.changes + 1) || '-' || %(random)s;

-- name: index_version
-- The collection's index version.
select index_version from tidegate.collections where name = %(collection)s;

-- name: search_passages
-- The k nearest passages of a collection whose tags contain the given ones, by inner product of unit vectors, which is cosine similarity.
select near.id, d.source, d.title, near.text, least(1, greatest(0, -near.distance))::float8 as score, near.page, near.tags::text, near.boxes::text
from (
    select p.id, p.document_id, p.text, p.page, p.tags, p.boxes, p.embedding <#> %(vector)s::halfvec as distance
    from tidegate.passages as p
    where p.collection = %(collection)s and p.tags @> %(tags)s::jsonb
    order by distance, p.id
    limit %(k)s
) as near
join tidegate.documents as d on d.id = near.document_id
order by near.distance, near.id;
