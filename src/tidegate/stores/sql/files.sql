-- name: put_file
-- Keep a document's original bytes; bytes that are there already are not written again.
insert into tidegate.files (document_id, sha256, bytes) values (%(document_id)s, %(sha256)s, %(bytes)b)
on conflict (document_id) do update set sha256 = excluded.sha256, bytes = excluded.bytes where files.sha256 <> excluded.sha256;

-- name: drop_file
-- Forget a document's original bytes.
delete from tidegate.files where document_id = %(document_id)s;

-- name: read_file
-- Original bytes by their digest.
select bytes from tidegate.files where sha256 = %(sha256)s limit 1;

-- name: stored_passages
-- Passages by id as they are now, and the digest of the file that their document was read from, where it is kept.
select p.id, d.source, d.title, p.text, p.page, p.heading, p.boxes::text, f.sha256
from tidegate.passages as p join tidegate.documents as d on d.id = p.document_id left join tidegate.files as f on f.document_id = d.id
where p.collection = %(collection)s and p.id = any(%(ids)s);
