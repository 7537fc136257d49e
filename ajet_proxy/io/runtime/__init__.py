"""Clock, processes, metrics, memory: what every other room of io stands on."""
