"""What socket tests share: a scripted worker, a running router, a client that hides nothing, and the search for leaks."""
