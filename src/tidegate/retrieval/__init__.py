"""Passages we can quote: documents become chunks, chunks become vectors, and a question finds the nearest."""
