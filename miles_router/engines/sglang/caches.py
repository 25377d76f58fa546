"""Keeping prefix caches apart: which requests take a key of their cache, and how it is written into one. Pure.

Source: SGLang 0.5.23, `io_struct.GenerateReqInput`, `openai/protocol.py` and `mem_cache/radix_cache.RadixKey`: prompts
share keys and values only within the same `extra_key`, which a list of prompts has as one text or one text for each.
`/v1/messages` and the paths of Ollama and Vertex AI do not hand one on.
"""

from __future__ import annotations

from collections.abc import Mapping

from miles_router.engines import paths
from miles_router.engines.facts import Facts
from miles_router.engines.sglang.paths import INVOCATIONS
from miles_router.engines.writing import with_key

CACHE_KEY = "extra_key"
#: The schema of the requests to each path that takes one.
SCHEMAS: Mapping[str, str] = {
    paths.GENERATE: "GenerateReqInput",
    paths.CHAT: "ChatCompletionRequest",
    paths.COMPLETIONS: "CompletionRequest",
    paths.RESPONSES: "ResponsesRequest",
    INVOCATIONS: "ChatCompletionRequest",
}


def takes_cache_key(facts: Facts, path: str) -> bool:
    """Whether an engine says that requests to this path may have a key."""
    schema = SCHEMAS.get(path)
    return schema is not None and facts.takes_field(schema, CACHE_KEY) is True


def with_cache_key(body: bytes, key: str) -> bytes:
    """A request with this key in front of its own."""
    return with_key(body, CACHE_KEY, key, "{}/{}".format)
