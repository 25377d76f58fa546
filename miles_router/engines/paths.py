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

#: Control requests: the router's own API, in SGLang's words.
PAUSE, CONTINUE, ABORT = "/pause_generation", "/continue_generation", "/abort_request"
FLUSH = "/flush_cache"
SLEEP, WAKE = "/release_memory_occupation", "/resume_memory_occupation"
UPDATE_VERSION, UPDATE_FROM_DISK = "/update_weight_version", "/update_weights_from_disk"
BEGIN_UPDATE, END_UPDATE = "/begin_weight_update", "/end_weight_update"
#: With these begin the paths of updates that only a user's own engine has.
OWN_UPDATES = "/update_weights_"
LOAD_ADAPTER, UNLOAD_ADAPTER = "/load_lora_adapter", "/unload_lora_adapter"
START_PROFILE, STOP_PROFILE = "/start_profile", "/stop_profile"
SLOW_DOWN, CONFIGURE_LOGGING, FREEZE_GC = "/slow_down", "/configure_logging", "/freeze_gc"
START_EXPERTS, STOP_EXPERTS, DUMP_EXPERTS = (
    "/start_expert_distribution_record",
    "/stop_expert_distribution_record",
    "/dump_expert_distribution_record",
)

MODELS = "/v1/models"
COUNT_TOKENS = "/v1/messages/count_tokens"
TOKENIZERS = frozenset({"/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"})
#: What an agent may post beside what generates. Nothing here changes an engine.
ASIDE = TOKENIZERS | {COUNT_TOKENS, EMBEDDINGS}
#: What the clients' key opens where administration has a key of its own; one that ends with `/` stands for all beneath
#: it. Everything else that an engine answers needs the key of administration, so that a new engine opens nothing.
CLIENT_PATHS = COMPUTED | ASIDE | {MODELS, f"{MODELS}/", f"{RESPONSES}/", *MODEL_INFO, "/api/tags", "/api/show"}
