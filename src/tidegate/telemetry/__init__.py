"""Listens to finished flights: metrics, the newest flights, the log and the figures of /health. Nobody on the path knows this room."""
