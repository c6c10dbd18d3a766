-- Search by time, tags and confidence beside nearness: documents have a date, a confidence and perhaps a successor; passages lie in one partition
-- for each collection, each with the indexes that fit it. Every statement may run twice.

ALTER TABLE tidegate.documents ADD COLUMN IF NOT EXISTS dated_at timestamptz NOT NULL DEFAULT now();
ALTER TABLE tidegate.documents ADD COLUMN IF NOT EXISTS confidence real NOT NULL DEFAULT 1;
ALTER TABLE tidegate.documents ADD COLUMN IF NOT EXISTS supersedes text[] NOT NULL DEFAULT '{}';
ALTER TABLE tidegate.documents ADD COLUMN IF NOT EXISTS superseded_by text;
CREATE INDEX IF NOT EXISTS documents_supersedes ON tidegate.documents USING gin (supersedes);

-- Tags by which a search may go through an index that holds all it needs (see the function below), the first one first.
ALTER TABLE tidegate.collections ADD COLUMN IF NOT EXISTS facets text[] NOT NULL DEFAULT '{}';

DO $$
BEGIN
    IF (SELECT relkind FROM pg_class WHERE oid = 'tidegate.passages'::regclass) = 'r' THEN
        ALTER TABLE tidegate.passages RENAME TO passages_before;
        DROP INDEX tidegate.passages_document, tidegate.passages_collection, tidegate.passages_tags;
        CREATE TABLE tidegate.passages (LIKE tidegate.passages_before INCLUDING DEFAULTS) PARTITION BY LIST (collection);
        ALTER TABLE tidegate.passages
            ADD COLUMN dated_at timestamptz NOT NULL DEFAULT now(),
            ADD COLUMN confidence real NOT NULL DEFAULT 1,
            ADD COLUMN superseded boolean NOT NULL DEFAULT false;
        -- A vector in an index lies there as it is: compressing it would cost each row of a search a microsecond.
        ALTER TABLE tidegate.passages ALTER embedding SET STORAGE PLAIN;
    END IF;
END $$;

-- id is stable by content: tidegate.core.document.passage_ids.
CREATE UNIQUE INDEX IF NOT EXISTS passages_id ON tidegate.passages (collection, id);
DROP INDEX IF EXISTS tidegate.passages_collection;
CREATE INDEX IF NOT EXISTS passages_document ON tidegate.passages (document_id);
CREATE INDEX IF NOT EXISTS passages_tags ON tidegate.passages USING gin (tags jsonb_path_ops);
-- Whatever a search by time filters on and orders by stands in the index: the table itself is read for the passages that are found.
CREATE INDEX IF NOT EXISTS passages_time ON tidegate.passages (dated_at)
    INCLUDE (collection, tags, confidence, superseded, id, embedding);

-- The partition of a collection, by name; made where it is not there. Attached rather than created in place: that stops no reader.
CREATE OR REPLACE FUNCTION tidegate.passages_partition(wanted text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    part text := 'passages_' || substr(md5(wanted), 1, 16);
BEGIN
    IF to_regclass('tidegate.' || part) IS NULL THEN
        PERFORM pg_advisory_xact_lock(hashtextextended('tidegate partition ' || wanted, 0));
        IF to_regclass('tidegate.' || part) IS NULL THEN
            EXECUTE format('CREATE TABLE tidegate.%I (LIKE tidegate.passages INCLUDING ALL)', part);
            EXECUTE format('ALTER TABLE tidegate.%I ADD FOREIGN KEY (document_id) REFERENCES tidegate.documents ON DELETE CASCADE', part);
            EXECUTE format('COMMENT ON TABLE tidegate.%I IS %L', part, wanted);
            EXECUTE format('ALTER TABLE tidegate.passages ATTACH PARTITION tidegate.%I FOR VALUES IN (%L)', part, wanted);
        END IF;
    END IF;
    RETURN part;
END $$;

DO $$
BEGIN
    IF to_regclass('tidegate.passages_before') IS NOT NULL THEN
        PERFORM tidegate.passages_partition(collection) FROM (SELECT DISTINCT collection FROM tidegate.passages_before) AS all_of_them;
        INSERT INTO tidegate.passages
            SELECT before.*, document.ingested_at, 1, false
            FROM tidegate.passages_before AS before JOIN tidegate.documents AS document ON document.id = before.document_id;
        UPDATE tidegate.documents SET dated_at = ingested_at;
        DROP TABLE tidegate.passages_before;
    END IF;
END $$;
