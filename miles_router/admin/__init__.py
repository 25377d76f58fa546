"""The router's own HTTP routes."""
