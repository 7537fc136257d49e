"""Processes that take agents' connections."""
