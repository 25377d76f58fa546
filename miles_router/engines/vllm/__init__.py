"""vLLM. Pure."""
