"""One router on several processes."""
