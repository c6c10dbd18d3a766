"""Everything that keeps bytes: the local flight spool, the database, sealed texts."""
