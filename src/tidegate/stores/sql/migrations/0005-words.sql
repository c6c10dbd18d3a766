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
