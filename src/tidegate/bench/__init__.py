"""Measures from outside, over HTTP alone; and the scripted engine's server, which answers as it is told."""
