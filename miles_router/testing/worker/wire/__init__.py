"""Parsing of requests and building of answers in the engine's wire formats."""
