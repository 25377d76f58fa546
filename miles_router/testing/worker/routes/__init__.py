"""The simulated worker's HTTP routes, one module for each kind of request."""
