"""What socket tests share: a scripted worker, a running router, a raw client, and the search for leaks."""
