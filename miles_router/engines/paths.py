"""The paths of an engine's HTTP API that others than the table of control requests need. Pure."""

from __future__ import annotations

#: What an engine says about itself, newest name first; SGLang before 0.5 has only the second of each.
MODEL_INFO = ("/model_info", "/get_model_info")
SERVER_INFO = ("/server_info", "/get_server_info")
SCHEMA = ("/openapi.json",)
#: Its numbers, as Prometheus reads them.
METRICS = "/metrics"
#: Generates a token: slow under load, and silent while the engine is paused.
HEALTH = "/health"
#: 503 while the engine is paused, and after a failed `/health` until one succeeds.
READY = "/ready"

GENERATE = "/generate"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
#: The same as Ollama spells it, which SGLang answers too.
OLLAMA_CHAT, OLLAMA_GENERATE = "/api/chat", "/api/generate"

#: Paths whose requests generate; all others pass a closed gate.
GENERATION = frozenset({GENERATE, CHAT, COMPLETIONS, MESSAGES, RESPONSES, OLLAMA_CHAT, OLLAMA_GENERATE})
