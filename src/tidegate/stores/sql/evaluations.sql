-- name: add_evaluation
-- What a set said of a collection.
insert into tidegate.evaluations (at, collection, index_version, set_name, set_sha256, report)
values (to_timestamp(%(at_unix_s)s), %(collection)s, %(index_version)s, %(set_name)s, %(set_sha256)s, %(report)s::jsonb);

-- name: list_evaluations
-- Of one collection, newest first.
select extract(epoch from at)::float8, collection, index_version, set_name, set_sha256, report::text
from tidegate.evaluations
where collection = %(collection)s
order by at desc, id desc
limit %(limit)s;
