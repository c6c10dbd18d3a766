-- What sets of questions said of a collection, by its index version.

CREATE TABLE IF NOT EXISTS tidegate.evaluations (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT now(),
    collection text NOT NULL,
    index_version text NOT NULL,
    set_name text NOT NULL,
    set_sha256 text NOT NULL,
    report jsonb NOT NULL
);
CREATE INDEX IF NOT EXISTS evaluations_collection ON tidegate.evaluations (collection, at DESC);
