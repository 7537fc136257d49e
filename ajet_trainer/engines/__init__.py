"""Everything that a trainer asks of inference servers. vLLM's routes and words stand here, and in no backend."""
