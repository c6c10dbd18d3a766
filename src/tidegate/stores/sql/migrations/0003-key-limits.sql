-- What one key may have at work at once, and may spend in a day; 0: no limit of its own.

ALTER TABLE tidegate.api_keys ADD COLUMN IF NOT EXISTS concurrent integer NOT NULL DEFAULT 0;
ALTER TABLE tidegate.api_keys ADD COLUMN IF NOT EXISTS money_per_day double precision NOT NULL DEFAULT 0;
