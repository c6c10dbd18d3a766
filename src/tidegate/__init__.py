"""Tidegate: a self-hosted gate between business systems and language models."""

__version__ = "0.1.0"
