"""What every room says. No I/O here: plain data, errors and ports."""
