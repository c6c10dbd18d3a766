-- name: bound_statements
-- For a new connection: the database stops a statement, and a transaction left open, after a time.
select set_config('statement_timeout', %(timeout_ms)s, false), set_config('idle_in_transaction_session_timeout', '60000', false);
