"""An agent's request on its way to the engine, and the answer on its way back."""
