"""Everything that runs a model: from an engine's bytes to chunks, and the few engines this gateway knows."""
