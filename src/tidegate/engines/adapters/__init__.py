"""One file, one engine. Each has `build(name, settings) -> Engine`; the file's name is the `adapter` of `[engines.NAME]`."""
