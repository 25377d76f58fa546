"""Fails while it is imported, on purpose."""

raise RuntimeError("broken on purpose")
