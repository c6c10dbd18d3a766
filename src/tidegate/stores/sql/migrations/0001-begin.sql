-- The first schema: keys, documents and passages, flights.
-- Every statement may run twice: a process killed between a migration and its mark must not stop the next start.

CREATE EXTENSION IF NOT EXISTS vector WITH SCHEMA public;

-- API keys: never the key itself, only its SHA-256.
CREATE TABLE IF NOT EXISTS tidegate.api_keys (
    id text PRIMARY KEY,
    sha256 text NOT NULL UNIQUE,
    tenant text NOT NULL,
    role text NOT NULL CHECK (role IN ('data', 'admin')),
    name text NOT NULL,
    created_at timestamptz NOT NULL,
    revoked_at timestamptz,
    requests_per_minute integer NOT NULL DEFAULT 0,
    tokens_per_minute integer NOT NULL DEFAULT 0
);

-- index_version changes with every change of the collection's content.
CREATE TABLE IF NOT EXISTS tidegate.collections (
    name text PRIMARY KEY,
    changes bigint NOT NULL,
    index_version text NOT NULL
);

CREATE TABLE IF NOT EXISTS tidegate.documents (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    collection text NOT NULL,
    source text NOT NULL,
    title text NOT NULL,
    sha256 text NOT NULL,
    size_bytes bigint NOT NULL,
    tags jsonb NOT NULL DEFAULT '{}',
    version integer NOT NULL DEFAULT 1,
    ingested_at timestamptz NOT NULL DEFAULT now(),
    UNIQUE (collection, source)
);

-- id is stable by content: tidegate.core.document.passage_ids. The collection stands here too, so that a search needs one table to choose.
CREATE TABLE IF NOT EXISTS tidegate.passages (
    id text PRIMARY KEY,
    document_id bigint NOT NULL REFERENCES tidegate.documents ON DELETE CASCADE,
    collection text NOT NULL,
    ordinal integer NOT NULL,
    text text NOT NULL,
    page integer,
    heading text NOT NULL DEFAULT '',
    tokens integer NOT NULL DEFAULT 0,
    tags jsonb NOT NULL DEFAULT '{}',
    embedding halfvec(384) NOT NULL
);
CREATE INDEX IF NOT EXISTS passages_document ON tidegate.passages (document_id);
CREATE INDEX IF NOT EXISTS passages_collection ON tidegate.passages (collection);
CREATE INDEX IF NOT EXISTS passages_tags ON tidegate.passages USING gin (tags jsonb_path_ops);

-- id sorts by time (48 bits of milliseconds first), so "newest first" is "id desc". Collated C: ids are hex digits, compared as bytes.
CREATE TABLE IF NOT EXISTS tidegate.flights (
    id text COLLATE "C" PRIMARY KEY,
    began timestamptz NOT NULL,
    tenant text NOT NULL,
    capability text NOT NULL,
    model text NOT NULL,
    route text NOT NULL,
    "end" text NOT NULL,
    http_status integer NOT NULL,
    whole_ms double precision NOT NULL,
    ttft_ms double precision,
    prompt_tokens integer NOT NULL,
    completion_tokens integer NOT NULL,
    record jsonb NOT NULL
);
CREATE INDEX IF NOT EXISTS flights_tenant ON tidegate.flights (tenant, id DESC);
CREATE INDEX IF NOT EXISTS flights_capability ON tidegate.flights (capability, id DESC);
CREATE INDEX IF NOT EXISTS flights_end ON tidegate.flights ("end", id DESC);

-- Prompt and answer of one flight, encrypted before they left the gateway's memory (policy "keep" only).
CREATE TABLE IF NOT EXISTS tidegate.kept_texts (
    flight_id text COLLATE "C" PRIMARY KEY,
    tenant text NOT NULL,
    expires_at timestamptz NOT NULL,
    sealed bytea NOT NULL
);
CREATE INDEX IF NOT EXISTS kept_texts_expires ON tidegate.kept_texts (expires_at);
