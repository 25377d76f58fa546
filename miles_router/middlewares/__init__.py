"""What a middleware is, how it is loaded, and what it may see: the one public door."""
