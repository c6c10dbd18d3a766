-- The original bytes of documents that have pages, so that a passage can be shown where it stands. PDF is compressed already.

CREATE TABLE IF NOT EXISTS tidegate.files (
    document_id bigint PRIMARY KEY REFERENCES tidegate.documents ON DELETE CASCADE,
    sha256 text NOT NULL,
    bytes bytea NOT NULL
);
ALTER TABLE tidegate.files ALTER bytes SET STORAGE EXTERNAL;
CREATE INDEX IF NOT EXISTS files_sha256 ON tidegate.files (sha256);
