"""Pools: the workers of each model behind one router, each with its own fleet, and the choice of a pool for a
request."""
