"""The Messages API, carried over the engine's chat route."""
