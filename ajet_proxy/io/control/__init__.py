"""The control routes, the page, gauges and traces."""
