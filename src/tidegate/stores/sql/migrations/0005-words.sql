-- Search by words: which words stand in which passage, and in how many passages each stands, for BM25. What was stored before has none until it is
-- read again. Every statement may run twice.

-- In how many passages words stand, and how many there are in all of them.
ALTER TABLE tidegate.collections ADD COLUMN IF NOT EXISTS worded bigint NOT NULL DEFAULT 0;
ALTER TABLE tidegate.collections ADD COLUMN IF NOT EXISTS words_total bigint NOT NULL DEFAULT 0;

-- number: what its postings call a passage; null where it never had words. words: how many it has; words_digest: of these.
CREATE SEQUENCE IF NOT EXISTS tidegate.passage_numbers;
ALTER TABLE tidegate.passages ADD COLUMN IF NOT EXISTS number bigint;
ALTER TABLE tidegate.passages ADD COLUMN IF NOT EXISTS words integer NOT NULL DEFAULT 0;
ALTER TABLE tidegate.passages ADD COLUMN IF NOT EXISTS words_digest bigint NOT NULL DEFAULT 0;
CREATE INDEX IF NOT EXISTS passages_number ON tidegate.passages (number);

-- term: a digest of collection and word, so that each collection has words of its own in one table. posting: from the left, the passage's number
-- (40 bits), its number of words (16), how often this one is among them (8): a search reads no more than the primary key.
CREATE TABLE IF NOT EXISTS tidegate.postings (
    term bigint NOT NULL,
    posting bigint NOT NULL,
    PRIMARY KEY (term, posting)
);
CREATE INDEX IF NOT EXISTS postings_passage ON tidegate.postings ((posting >> 24));

-- In how many passages a word stands.
CREATE TABLE IF NOT EXISTS tidegate.words (
    term bigint PRIMARY KEY,
    passages bigint NOT NULL
) WITH (fillfactor = 70);

-- As in 0004-search, but the second look reads the catalogue: a name that was not there before the lock was waited for is remembered as missing, and
-- two documents that came first into one collection at the same time broke each other's writing.
CREATE OR REPLACE FUNCTION tidegate.passages_partition(wanted text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    part text := 'passages_' || substr(md5(wanted), 1, 16);
BEGIN
    IF to_regclass('tidegate.' || part) IS NULL THEN
        PERFORM pg_advisory_xact_lock(hashtextextended('tidegate partition ' || wanted, 0));
        IF NOT EXISTS (SELECT FROM pg_class WHERE relname = part AND relnamespace = 'tidegate'::regnamespace) THEN
            EXECUTE format('CREATE TABLE tidegate.%I (LIKE tidegate.passages INCLUDING ALL)', part);
            EXECUTE format('ALTER TABLE tidegate.%I ADD FOREIGN KEY (document_id) REFERENCES tidegate.documents ON DELETE CASCADE', part);
            EXECUTE format('COMMENT ON TABLE tidegate.%I IS %L', part, wanted);
            EXECUTE format('ALTER TABLE tidegate.passages ATTACH PARTITION tidegate.%I FOR VALUES IN (%L)', part, wanted);
        END IF;
    END IF;
    RETURN part;
END $$;
