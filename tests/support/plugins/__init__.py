"""Middlewares of other people, loaded by dotted path in tests."""
