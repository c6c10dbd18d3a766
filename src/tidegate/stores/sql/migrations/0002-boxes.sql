-- Where a passage stands on its pages: [[page, x0, top, x1, bottom], ...], points from the top left corner of the page as it is shown.

ALTER TABLE tidegate.passages ADD COLUMN IF NOT EXISTS boxes jsonb NOT NULL DEFAULT '[]';
