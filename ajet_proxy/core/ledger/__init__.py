"""Commands that decide, over a state that only events change: episodes, groups, leases, the gate, quotas, views."""
