"""Servers, TLS, errors, bodies, keys and the audit log."""
