"""The worker's HTTP API, a file for each kind of request."""
