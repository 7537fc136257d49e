"""Does a model learn from what users say next, and from nothing else? See `__main__`."""
