"""Proofs with real parts that clients may die, lanes share, and code may change while a model trains."""
