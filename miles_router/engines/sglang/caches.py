"""Keeping prefix caches apart: which requests take a key of their cache, and how it is written into one. Pure.

Source: SGLang 0.5.23, `io_struct.GenerateReqInput`, `openai/protocol.py` and `mem_cache/radix_cache.RadixKey`: prompts
share keys and values only within the same `extra_key`, which a list of prompts has as one text or one text for each.
`/v1/messages` and the paths of Ollama and Vertex AI do not hand one on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from miles_router.engines import paths
from miles_router.engines.facts import Facts
from miles_router.engines.sglang.paths import INVOCATIONS
from miles_router.engines.writing import extended

CACHE_KEY = "extra_key"
#: The schema of the requests to each path that takes one.
SCHEMAS: Mapping[str, str] = {
    paths.GENERATE: "GenerateReqInput",
    paths.CHAT: "ChatCompletionRequest",
    paths.COMPLETIONS: "CompletionRequest",
    paths.RESPONSES: "ResponsesRequest",
    INVOCATIONS: "ChatCompletionRequest",
}
_QUOTED = b'"%b"' % CACHE_KEY.encode()


def takes_cache_key(facts: Facts, path: str) -> bool:
    """Whether an engine says that requests to this path may have a key."""
    schema = SCHEMAS.get(path)
    return schema is not None and facts.takes_field(schema, CACHE_KEY) is True


def with_cache_key(body: bytes, key: str) -> bytes:
    """A request with this key in front of its own. One that cannot be read stays as it is: the engine says what is
    wrong with it."""
    if _QUOTED not in body:
        return extended(body, {CACHE_KEY: key})
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body
    if not isinstance(parsed, dict) or CACHE_KEY not in parsed:  # it stands in a text
        return extended(body, {CACHE_KEY: key})
    own = parsed[CACHE_KEY]
    return orjson.dumps(
        {**parsed, CACHE_KEY: [_joined(key, each) for each in own] if isinstance(own, list) else _joined(key, own)}
    )


def _joined(key: str, own: Any) -> Any:
    """What is no text stays, and the engine refuses it."""
    if own is None or own == "":
        return key
    return f"{key}/{own}" if isinstance(own, str) else own
