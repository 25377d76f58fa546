"""The paths of SGLang's HTTP API, control requests excepted. Pure.

Source: SGLang 0.5.23, `entrypoints/http_server.py`.
"""

from __future__ import annotations

from miles_router.engines.paths import AGENTS, COUNT_TOKENS, EMBEDDINGS, MODELS, RESPONSES

#: What it says about itself, newest name first; SGLang before 0.5 has only the second of each.
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
#: Tokenizing text. SGLang 0.5.23 shows only the first of the two names in its schema.
TOKENIZE = ("/v1/tokenize", "/tokenize")
TOKENIZERS = frozenset({*TOKENIZE, "/detokenize", "/v1/detokenize"})

#: Generations as two clouds spell them (SageMaker, Vertex AI), as Ollama does, and speech to text.
INVOCATIONS, VERTEX_GENERATE, TRANSCRIPTIONS = "/invocations", "/vertex_generate", "/v1/audio/transcriptions"
OLLAMA = frozenset({"/api/chat", "/api/generate"})
GENERATION = AGENTS | OLLAMA | {INVOCATIONS, VERTEX_GENERATE, TRANSCRIPTIONS}
ENCODE, CLASSIFY = "/encode", "/classify"
SCORING = frozenset({EMBEDDINGS, ENCODE, CLASSIFY, "/v1/classify", "/v1/score", "/v1/rerank"})
#: The HTTP process answers all others, or what they ask for changes the engine and may hold it for long.
COMPUTED = GENERATION | SCORING
ASIDE = TOKENIZERS | {COUNT_TOKENS, EMBEDDINGS}
CLIENT_PATHS = COMPUTED | ASIDE | {MODELS, f"{MODELS}/", f"{RESPONSES}/", *MODEL_INFO, "/api/tags", "/api/show"}
