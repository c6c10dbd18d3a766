"""Walks the stages of a capability and deals out its time."""
