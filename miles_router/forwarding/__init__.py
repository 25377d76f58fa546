"""Sending a request to a worker: connections, HTTP framing, retries, and the innermost ASGI app."""
