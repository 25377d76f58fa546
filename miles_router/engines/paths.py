"""The paths of an engine's HTTP API. Pure."""

from __future__ import annotations

#: What an engine says about itself, newest name first; SGLang before 0.5 has only the second of each.
MODEL_INFO = ("/model_info", "/get_model_info")
SERVER_INFO = ("/server_info", "/get_server_info")
SCHEMA = ("/openapi.json",)
#: Its numbers, as Prometheus reads them.
METRICS = "/metrics"
#: Generates a token: slow under load, and silent while the engine is paused.
HEALTH = "/health"
#: The same, whatever the engine's environment says of `/health`.
HEALTH_GENERATE = ("/health_generate",)
#: 503 while the engine is paused, and after a failed `/health` until one succeeds.
READY = "/ready"
#: 503 after a failed `/health` until one succeeds; a pause changes nothing.
WELL = "/ping"

GENERATE = "/generate"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
#: The same as Ollama spells it, which SGLang answers too.
OLLAMA_CHAT, OLLAMA_GENERATE = "/api/chat", "/api/generate"
#: The same as two clouds spell it (SageMaker, Vertex AI), and speech to text.
INVOCATIONS, VERTEX_GENERATE, TRANSCRIPTIONS = "/invocations", "/vertex_generate", "/v1/audio/transcriptions"

#: Paths whose requests generate; all others pass a closed gate.
GENERATION = frozenset({GENERATE, CHAT, COMPLETIONS, MESSAGES, RESPONSES, OLLAMA_CHAT, OLLAMA_GENERATE}) | {
    INVOCATIONS,
    VERTEX_GENERATE,
    TRANSCRIPTIONS,
}
#: Paths whose requests the engine itself works on without generating.
ENCODE, CLASSIFY = "/encode", "/classify"
SCORING = frozenset({EMBEDDINGS, ENCODE, CLASSIFY, "/v1/classify", "/v1/score", "/v1/rerank"})
#: Paths whose requests the engine itself works on. SGLang's HTTP process answers the others, or what they ask for
#: changes the engine and may hold it for long.
COMPUTED = GENERATION | SCORING

MODELS = "/v1/models"
COUNT_TOKENS = "/v1/messages/count_tokens"
TOKENIZERS = frozenset({"/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"})
#: What an agent may post beside what generates. Nothing here changes an engine.
ASIDE = TOKENIZERS | {COUNT_TOKENS, EMBEDDINGS}
#: What the clients' key opens where administration has a key of its own; one that ends with `/` stands for all beneath
#: it. Everything else that an engine answers needs the key of administration, so that a new engine opens nothing.
CLIENT_PATHS = COMPUTED | ASIDE | {MODELS, f"{MODELS}/", f"{RESPONSES}/", *MODEL_INFO, "/api/tags", "/api/show"}
