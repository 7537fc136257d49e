"""Programs that hard-code a provider's address: mitmproxy, its CA, its tunnels."""
