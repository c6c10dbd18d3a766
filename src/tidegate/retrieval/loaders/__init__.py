"""One file = one file format.

A loader exposes `SUFFIXES` and `load(path, bounds) -> Loaded`, raises DocumentUnreadable, and skips nothing silently: what it leaves out is
in `Loaded.notes`. Loaders run in a process of their own (load_child.py), so that a hostile file costs only its own job.
"""
