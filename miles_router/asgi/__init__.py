"""The ASGI parts of the router: request context, headers, keys, watching the client, and the relay of replies."""
