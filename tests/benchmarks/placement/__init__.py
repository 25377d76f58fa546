"""How long one rollout step takes behind each router and policy, on one simulated fleet: docs/placement.md."""
