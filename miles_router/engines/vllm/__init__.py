"""The vLLM engine. Pure."""
