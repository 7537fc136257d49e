"""The control plane as functions of the request and the ledger."""
