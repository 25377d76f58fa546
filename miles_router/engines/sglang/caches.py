"""Keys that separate prefix caches: which SGLang requests accept one, and how it is written. No I/O.

Source: SGLang 0.5.23, `io_struct.GenerateReqInput`, `openai/protocol.py` and `mem_cache/radix_cache.RadixKey`. Prompts
share KV cache only within the same `extra_key`. A batch has one key as a string, or a list with one per prompt.
`/v1/messages` and the paths of Ollama and Vertex AI do not pass one on.
"""

from __future__ import annotations

from collections.abc import Mapping

from miles_router.engines import paths
from miles_router.engines.facts import Facts
from miles_router.engines.sglang.paths import INVOCATIONS
from miles_router.engines.writing import with_key

CACHE_KEY = "extra_key"
#: The request schema of each path that accepts a key.
SCHEMAS: Mapping[str, str] = {
    paths.GENERATE: "GenerateReqInput",
    paths.CHAT: "ChatCompletionRequest",
    paths.COMPLETIONS: "CompletionRequest",
    paths.RESPONSES: "ResponsesRequest",
    INVOCATIONS: "ChatCompletionRequest",
}


def takes_cache_key(facts: Facts, path: str) -> bool:
    """Return whether the engine's schema allows a key in requests to this path."""
    schema = SCHEMAS.get(path)
    return schema is not None and facts.takes_field(schema, CACHE_KEY) is True


def with_cache_key(body: bytes, key: str) -> bytes:
    """Return the request with this key in front of the client's own."""
    return with_key(body, CACHE_KEY, key, "{}/{}".format)
