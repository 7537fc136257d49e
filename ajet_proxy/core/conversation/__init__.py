"""A conversation's history as digests, and which episode a request without a name continues."""
