"""The engines: requests to them, their pool, probes, rendering, rescoring, pausing."""
