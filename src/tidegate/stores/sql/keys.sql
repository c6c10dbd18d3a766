-- name: add_key
-- Store a key; a second try after a broken connection changes nothing.
insert into tidegate.api_keys (id, sha256, tenant, role, name, created_at, revoked_at, requests_per_minute, tokens_per_minute, concurrent,
                               money_per_day)
values (%(id)s, %(sha256)s, %(tenant)s, %(role)s, %(name)s, to_timestamp(%(created_unix_s)s), to_timestamp(%(revoked_unix_s)s),
        %(requests_per_minute)s, %(tokens_per_minute)s, %(concurrent)s, %(money_per_day)s)
on conflict (id) do nothing;

-- name: list_keys
-- All keys, oldest first, revoked ones too.
select id, sha256, tenant, role, name, extract(epoch from created_at)::float8 as created_unix_s,
       extract(epoch from revoked_at)::float8 as revoked_unix_s, requests_per_minute, tokens_per_minute, concurrent, money_per_day
from tidegate.api_keys
order by created_at, id;

-- name: limit_key
-- Change the limits of a key that lives; null leaves one as it is.
update tidegate.api_keys
set requests_per_minute = coalesce(%(requests_per_minute)s, requests_per_minute),
    tokens_per_minute = coalesce(%(tokens_per_minute)s, tokens_per_minute),
    concurrent = coalesce(%(concurrent)s, concurrent),
    money_per_day = coalesce(%(money_per_day)s, money_per_day)
where id = %(id)s and revoked_at is null
returning id;

-- name: revoke_key
-- Revoke a key; no row where there is none or it was revoked before.
update tidegate.api_keys set revoked_at = now() where id = %(id)s and revoked_at is null returning id;
