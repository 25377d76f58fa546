"""What is ASGI alone: a request's exchange, headers, keys, who watches the client, and the one relay of replies."""
