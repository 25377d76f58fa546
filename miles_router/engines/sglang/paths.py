"""The paths of SGLang's HTTP API, without control requests. No I/O.

Source: SGLang 0.5.23, `entrypoints/http_server.py`.
"""

from __future__ import annotations

from miles_router.engines.paths import AGENTS, COUNT_TOKENS, EMBEDDINGS, MODELS, RESPONSES

#: The documents about the engine, newest name first; SGLang before 0.5 has only the second of each.
MODEL_INFO = ("/model_info", "/get_model_info")
SERVER_INFO = ("/server_info", "/get_server_info")
SCHEMA = ("/openapi.json",)
#: The Prometheus metrics.
METRICS = "/metrics"
#: Generates a token: slow under load, and silent while the engine is paused.
HEALTH = "/health"
#: Like `/health`, but independent of the engine's environment variables.
HEALTH_GENERATE = ("/health_generate",)
#: 503 while the engine is paused, and after a failed `/health` until one succeeds.
READY = "/ready"
#: 503 after a failed `/health` until one succeeds; a pause changes nothing.
WELL = "/ping"
#: Tokenizing text. SGLang 0.5.23 shows only the first of the two names in its schema.
TOKENIZE = ("/v1/tokenize", "/tokenize")
TOKENIZERS = frozenset({*TOKENIZE, "/detokenize", "/v1/detokenize"})

#: The generation APIs of SageMaker, Vertex AI and Ollama, and speech to text.
INVOCATIONS, VERTEX_GENERATE, TRANSCRIPTIONS = "/invocations", "/vertex_generate", "/v1/audio/transcriptions"
OLLAMA = frozenset({"/api/chat", "/api/generate"})
GENERATION = AGENTS | OLLAMA | {INVOCATIONS, VERTEX_GENERATE, TRANSCRIPTIONS}
ENCODE, CLASSIFY = "/encode", "/classify"
SCORING = frozenset({EMBEDDINGS, ENCODE, CLASSIFY, "/v1/classify", "/v1/score", "/v1/rerank"})
#: Of all other paths, the HTTP process answers without the model, or the request changes the engine and may block it
#: for long.
COMPUTED = GENERATION | SCORING
ASIDE = TOKENIZERS | {COUNT_TOKENS, EMBEDDINGS}
CLIENT_PATHS = COMPUTED | ASIDE | {MODELS, f"{MODELS}/", f"{RESPONSES}/", *MODEL_INFO, "/api/tags", "/api/show"}
