"""A cost model of a real GPU, for time and memory: prices, prefix cache, batch schedule, and its clock."""
