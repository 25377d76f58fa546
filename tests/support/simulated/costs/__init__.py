"""A worker with the time and memory of a real GPU: prices, prefix cache, batch schedule, and its clock."""
