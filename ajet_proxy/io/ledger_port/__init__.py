"""The one door to the ledger, in this process or in another."""
