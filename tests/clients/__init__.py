"""Agents as other people publish them, each in an environment of its own, driven against a session."""
