"""Judges what a model says while it says it."""
