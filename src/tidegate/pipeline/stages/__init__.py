"""One file = one stage. Each module has `build(capability, parts) -> Stage`."""
