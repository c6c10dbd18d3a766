-- name: write_flights
-- Store finished flights from one JSON array; those that are there already stay as they are.
insert into tidegate.flights
    (id, began, tenant, capability, model, route, "end", http_status, whole_ms, ttft_ms, prompt_tokens, completion_tokens, record)
select r->>'id', to_timestamp((r->>'began_unix_ns')::numeric / 1e9), coalesce(r->>'tenant', ''), coalesce(r->>'capability', ''),
       coalesce(r->>'model', ''), r->>'route', r->>'end', (r->>'http_status')::integer, (r->>'whole_ns')::float8 / 1e6,
       (r->>'first_token_ns')::float8 / 1e6, coalesce((r->'usage'->>'prompt_tokens')::integer, 0),
       coalesce((r->'usage'->>'completion_tokens')::integer, 0), r
from jsonb_array_elements(%(records)s::jsonb) as r
on conflict (id) do nothing;

-- name: write_kept
-- Store encrypted texts, but none whose time is over.
insert into tidegate.kept_texts (flight_id, tenant, expires_at, sealed)
select flight_id, tenant, to_timestamp(expires_unix_s), sealed
from unnest(%(flight_ids)s::text[], %(tenants)s::text[], %(expires)s::float8[], %(sealed)s::bytea[])
     as kept (flight_id, tenant, expires_unix_s, sealed)
where to_timestamp(expires_unix_s) > now()
on conflict (flight_id) do nothing;

-- name: get_flight
-- The record of one flight.
select record::text from tidegate.flights where id = %(id)s;

-- name: list_flights
-- Records, newest first, by tenant, capability and end, before an id; null means any.
select record::text
from tidegate.flights
where (%(tenant)s::text is null or tenant = %(tenant)s)
  and (%(capability)s::text is null or capability = %(capability)s)
  and (%(end)s::text is null or "end" = %(end)s)
  and (%(before_id)s::text is null or id < %(before_id)s)
order by id desc
limit %(limit)s;

-- name: get_kept
-- The encrypted text of one flight, unless its time is over.
select flight_id, tenant, extract(epoch from expires_at)::float8 as expires_unix_s, sealed
from tidegate.kept_texts
where flight_id = %(id)s and expires_at > now();

-- name: forget_expired
-- Delete encrypted texts whose time is over.
delete from tidegate.kept_texts where expires_at <= now();
