"""The middlewares that ship with miles-router, built on its public names alone."""
