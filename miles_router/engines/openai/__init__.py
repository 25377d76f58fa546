"""Requests to the engine's OpenAI endpoints, chat and completions, and the reading of their answers. Pure."""
