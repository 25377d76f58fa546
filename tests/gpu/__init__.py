"""A real mixture-of-experts model on a GPU behind the router: weight transfers, and what the GPU costs."""
