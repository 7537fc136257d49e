"""The journal, snapshots, the archive, and the store that puts ledger and journal together."""
