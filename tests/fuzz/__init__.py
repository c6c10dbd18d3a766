"""Fuzzing of what reads an engine's bytes."""
