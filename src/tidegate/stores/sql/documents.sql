-- name: document_sha
-- The digest under which a document was stored last.
select sha256 from tidegate.documents where collection = %(collection)s and source = %(source)s;

-- name: put_document
-- Store or replace a document's head; locks its row until the transaction ends, so that two writers of one document take turns.
insert into tidegate.documents (collection, source, title, sha256, size_bytes, tags, dated_at, confidence, supersedes, fingerprint)
values (%(collection)s, %(source)s, %(title)s, %(sha256)s, %(size_bytes)s, %(tags)s::jsonb,
        coalesce(to_timestamp(%(dated_unix_s)s), now()), %(confidence)s, %(supersedes)s, %(fingerprint)s)
on conflict (collection, source) do update
    set title = excluded.title, sha256 = excluded.sha256, size_bytes = excluded.size_bytes, tags = excluded.tags, dated_at = excluded.dated_at,
        confidence = excluded.confidence, supersedes = excluded.supersedes, fingerprint = excluded.fingerprint, version = documents.version + 1, ingested_at = now()
returning id, version, dated_at, superseded_by is not null;

-- name: make_partition
-- The partition that holds a collection's passages; made where it is not there.
select tidegate.passages_partition(%(collection)s);

-- name: mark_superseded
-- After a document came, changed or went: it and those that it names or named are superseded by whichever document names them now.
with now_superseded as (
    select one.id, (
        select min(other.source) from tidegate.documents as other
        where other.collection = one.collection and other.supersedes @> array[one.source] and other.id <> one.id
    ) as by
    from tidegate.documents as one
    where one.collection = %(collection)s
      and (one.source = %(source)s or one.source = any(%(supersedes)s) or one.superseded_by = %(source)s)
    order by one.id
    for update
), changed as (
    update tidegate.documents as document set superseded_by = now_superseded.by
    from now_superseded where now_superseded.id = document.id and document.superseded_by is distinct from now_superseded.by
    returning document.id, document.superseded_by is not null as superseded
)
update tidegate.passages as passage set superseded = changed.superseded
from changed
where passage.collection = %(collection)s and passage.document_id = changed.id and passage.superseded <> changed.superseded;

-- name: document_passages
-- A document's passages: their ids, and what is known of their words.
select id, number, words, words_digest from tidegate.passages where collection = %(collection)s and document_id = %(document_id)s;

-- name: drop_passages
-- Delete passages of a document by id.
delete from tidegate.passages where collection = %(collection)s and document_id = %(document_id)s and id = any(%(ids)s);

-- name: put_passage
-- Store a passage; one that is there already is only touched where something about it changed.
insert into tidegate.passages
    (id, document_id, collection, ordinal, text, page, heading, tokens, tags, boxes, embedding, dated_at, confidence, superseded,
     number, words, words_digest)
values (%(id)s, %(document_id)s, %(collection)s, %(ordinal)s, %(text)s, %(page)s, %(heading)s, %(tokens)s, %(tags)s::jsonb,
        %(boxes)s::jsonb, %(embedding)s::halfvec, %(dated_at)s, %(confidence)s, %(superseded)s,
        %(number)s, %(words)s, %(words_digest)s)
on conflict (collection, id) do update
    set ordinal = excluded.ordinal, page = excluded.page, heading = excluded.heading, tokens = excluded.tokens, tags = excluded.tags,
        boxes = excluded.boxes, embedding = excluded.embedding, dated_at = excluded.dated_at, confidence = excluded.confidence, superseded = excluded.superseded,
        number = excluded.number, words = excluded.words, words_digest = excluded.words_digest
    where (passages.ordinal, passages.page, passages.heading, passages.tokens, passages.tags, passages.boxes,
           passages.embedding, passages.dated_at, passages.confidence, passages.superseded,
           passages.number, passages.words, passages.words_digest)
          is distinct from (excluded.ordinal, excluded.page, excluded.heading, excluded.tokens, excluded.tags, excluded.boxes,
           excluded.embedding, excluded.dated_at, excluded.confidence, excluded.superseded,
           excluded.number, excluded.words, excluded.words_digest);

-- name: delete_document
-- Delete a document and, with it, its passages.
delete from tidegate.documents where collection = %(collection)s and source = %(source)s returning id;

-- name: list_documents
-- Documents by collection and source, with the number of their passages; a null collection means all.
select collection, source, title, sha256, size_bytes, tags::text, version,
       extract(epoch from dated_at)::float8 as dated_unix_s, confidence, supersedes, superseded_by,
       (select count(*) from tidegate.passages where collection = documents.collection and document_id = documents.id) as passages,
       extract(epoch from ingested_at)::float8 as ingested_unix_s
from tidegate.documents
where %(collection)s::text is null or collection = %(collection)s
order by collection collate "C", source collate "C";

-- name: change_collection
-- Give a collection a new index version, because its content changes in this transaction, and count its words. Gives the fingerprint of all its vectors.
insert into tidegate.collections (name, changes, index_version, worded, words_total, fingerprint)
values (%(collection)s, 1, '1-' || %(random)s, %(worded)s, %(words_total)s, %(fingerprint)s)
on conflict (name) do update
    set changes = collections.changes + 1, index_version = (collections.changes + 1) || '-' || %(random)s,
        worded = collections.worded + excluded.worded, words_total = collections.words_total + excluded.words_total,
        fingerprint = coalesce(nullif(collections.fingerprint, ''), excluded.fingerprint)
returning fingerprint;

-- name: collection_fingerprint
-- Of which embedder a collection's vectors are.
select fingerprint from tidegate.collections where name = %(collection)s;

-- name: begin_reembedding
-- Put a collection on its way to another embedder: nobody searches it from here on.
update tidegate.collections set fingerprint = '>' || %(fingerprint)s
where name = %(collection)s and fingerprint not in (%(fingerprint)s, '>' || %(fingerprint)s);

-- name: documents_unembedded
-- Documents whose vectors are of another embedder, with what is embedded of their passages.
select d.source, d.title, d.version,
       coalesce(json_agg(json_build_array(p.id, p.heading, p.text) order by p.ordinal) filter (where p.id is not null), '[]')::text
from (
    select id, source, title, version from tidegate.documents
    where collection = %(collection)s and fingerprint <> %(fingerprint)s order by id limit %(limit)s
) as d
left join tidegate.passages as p on p.collection = %(collection)s and p.document_id = d.id
group by d.id, d.source, d.title, d.version;

-- name: lock_version
-- A document as it was when it was read, locked; nothing where it changed.
update tidegate.documents set fingerprint = %(fingerprint)s
where collection = %(collection)s and source = %(source)s and version = %(version)s returning id;

-- name: put_vector
-- Another vector for a passage.
update tidegate.passages set embedding = %(embedding)s::halfvec where collection = %(collection)s and id = %(id)s;

-- name: end_reembedding
-- All of a collection's vectors are of one embedder again.
update tidegate.collections
set fingerprint = %(fingerprint)s, changes = changes + 1, index_version = (changes + 1) || '-' || %(random)s
where name = %(collection)s and fingerprint = '>' || %(fingerprint)s
  and not exists (select from tidegate.documents where collection = %(collection)s and fingerprint <> %(fingerprint)s);

-- name: take_numbers
-- Numbers for passages that come.
select nextval('tidegate.passage_numbers') from generate_series(1, %(count)s);

-- name: lock_document
-- A document that goes: its row is locked until the transaction ends.
select id from tidegate.documents where collection = %(collection)s and source = %(source)s for update;

-- name: drop_postings
-- Passages, by number, have no words any more; gives each word that they had, and in how many of them it stood.
with gone as (delete from tidegate.postings where posting >> 24 = any(%(numbers)s::bigint[]) returning term)
select term, count(*) from gone group by term;

-- name: put_postings
-- Words of passages, in bulk.
copy tidegate.postings (term, posting) from stdin (format binary);

-- name: count_words
-- In how many passages more, or fewer, each word stands now; after the collection's row is locked, so that two writers take turns.
insert into tidegate.words (term, passages)
select * from unnest(%(terms)s::bigint[], %(counts)s::bigint[])
on conflict (term) do update set passages = words.passages + excluded.passages;

-- name: forget_words
-- Words that stand nowhere any more.
delete from tidegate.words where term = any(%(terms)s::bigint[]) and passages <= 0;
