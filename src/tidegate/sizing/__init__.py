"""Sizes: what a model needs (plan), and what admission makes of a load (simulate). Nothing here is on the way of a request."""
