-- Of which embedder the vectors are: those of a document; and those of a collection, which has all of one. Every statement may run twice.

-- '': no vectors yet. '>' and a fingerprint: on the way to it, and not to be searched until all are.
ALTER TABLE tidegate.collections ADD COLUMN IF NOT EXISTS fingerprint text NOT NULL DEFAULT '';
ALTER TABLE tidegate.documents ADD COLUMN IF NOT EXISTS fingerprint text NOT NULL DEFAULT '';

-- What was stored before is of the only embedder that there was.
UPDATE tidegate.collections SET fingerprint = 'multilingual-e5-small/1571fc9827503943/384/1' WHERE fingerprint = '';
UPDATE tidegate.documents SET fingerprint = 'multilingual-e5-small/1571fc9827503943/384/1' WHERE fingerprint = '';
