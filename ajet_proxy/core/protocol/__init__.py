"""One exchange in a client's dialect: what to ask the engine, how to read its answer, what to take out again."""
