"""The paths of vLLM's HTTP API, control requests excepted. Pure.

Source: vLLM 0.32.0, `entrypoints/`. Those under `/inference` need `--enable-scale-out`, those that ask the
engine's core `VLLM_SERVER_DEV_MODE=1`.
"""

from __future__ import annotations

from miles_router.engines.paths import AGENTS, COUNT_TOKENS, EMBEDDINGS, MODELS, RESPONSES

#: What it says about itself.
VERSION, SERVER_INFO, MODEL_LIST = ("/version",), ("/server_info?config_format=json",), (MODELS,)
#: Answered by the engine's core, in a pause too. `/health` says 200 while the core hangs.
WEIGHT_INFO = ("/weight_info",)
IS_PAUSED = "/is_paused"
METRICS = "/metrics"

#: Samples behind ids. A GET tells whether it is there: 405, or 403 without `--enable-scale-out`.
SAMPLE = "/inference/v1/generate"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
TOKENIZERS = frozenset({TOKENIZE, DETOKENIZE})

GENERATION = AGENTS | {SAMPLE}
SCORING = frozenset({EMBEDDINGS, "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank"})
COMPUTED = GENERATION | SCORING
ASIDE = TOKENIZERS | {COUNT_TOKENS, EMBEDDINGS}
CLIENT_PATHS = COMPUTED | ASIDE | {MODELS, f"{MODELS}/", f"{RESPONSES}/", *VERSION}
