"""Who the workers are: addresses, states, leases, the policies that choose among them, the gate, who is in flight."""
