"""Runs from afar: what may run on this host, who keeps it, and what is told of it. The command line alone asks here."""
