"""The paths of vLLM's HTTP API, control requests excepted. Pure.

Source: vLLM 0.32.0, `entrypoints/`. Paths under `/inference` need `--enable-scale-out`; paths that ask the engine's
core need `VLLM_SERVER_DEV_MODE=1`.
"""

from __future__ import annotations

from miles_router.engines.paths import AGENTS, COUNT_TOKENS, EMBEDDINGS, MODELS, RESPONSES

#: Documents in which the server describes itself.
VERSION, SERVER_INFO, MODEL_LIST = ("/version",), ("/server_info?config_format=json",), (MODELS,)
#: The engine's core answers this path, also while paused. `/health` answers 200 even while the core hangs.
WEIGHT_INFO = ("/weight_info",)
IS_PAUSED = "/is_paused"
METRICS = "/metrics"

#: Generates from prompt ids. A GET returns 405 if the path is enabled, and 403 without `--enable-scale-out`.
SAMPLE = "/inference/v1/generate"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
TOKENIZERS = frozenset({TOKENIZE, DETOKENIZE})

GENERATION = AGENTS | {SAMPLE}
SCORING = frozenset({EMBEDDINGS, "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank"})
COMPUTED = GENERATION | SCORING
ASIDE = TOKENIZERS | {COUNT_TOKENS, EMBEDDINGS}
CLIENT_PATHS = COMPUTED | ASIDE | {MODELS, f"{MODELS}/", f"{RESPONSES}/", *VERSION}
