"""The workers: addresses, states, leases, placement policies, the gate, and the requests in flight."""
