"""Builds the rooms and hands each what it needs: the only place that knows everybody."""
