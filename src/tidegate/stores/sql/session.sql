-- name: set_session
-- For a new connection: statements are bounded, plans know a filter's values, a search takes one core, a graph is searched until enough fits.
select set_config('statement_timeout', %(timeout_ms)s, false), set_config('idle_in_transaction_session_timeout', '60000', false),
       set_config('plan_cache_mode', 'force_custom_plan', false), set_config('jit', 'off', false),
       set_config('max_parallel_workers_per_gather', '0', false), set_config('hnsw.iterative_scan', 'relaxed_order', false),
       set_config('hnsw.ef_search', '100', false);
