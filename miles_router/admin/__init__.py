"""The router's own HTTP routes, and its dashboard."""
