"""`make train`: a small model learns through the router, with real SGLang and without a GPU."""
