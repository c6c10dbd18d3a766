"""One file, one drill: each gives `SUMMARY` and `broken(scene)`, a context in which a part is broken, and out of which it is whole again."""
