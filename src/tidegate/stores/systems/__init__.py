"""One file = one system; each names the ports that it serves."""
