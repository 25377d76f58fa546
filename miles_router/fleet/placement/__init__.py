"""Which unit takes a request: what a policy is told, those that ship, and where sessions are at home."""
