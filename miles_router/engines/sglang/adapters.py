"""LoRA adapters of SGLang: how requests select one, and which ones are loaded. No I/O.

Source: SGLang 0.5.23. `openai/serving_base.py` reads `base:adapter` as an adapter, and silently uses the base weights
for any other name. `/generate` ignores the model and has `lora_path`. `openai/serving_responses.py` and the Ollama APIs
accept the name of an adapter and never apply it.
"""

from __future__ import annotations

import orjson

from miles_router.engines.engine import CannotServe, Parse
from miles_router.engines.models import ADAPTER, lora_path_of
from miles_router.engines.paths import CHAT, COMPLETIONS, EMBEDDINGS, GENERATE, MESSAGES
from miles_router.engines.sglang.paths import CLASSIFY, ENCODE, INVOCATIONS
from miles_router.engines.writing import extended

#: The field of an adapter's name in control requests and reports.
NAME = "lora_name"
#: The field of the path that an adapter is loaded from.
PATH = ADAPTER
#: Paths where only a field selects the adapter; paths where a model `base:adapter` does; all paths with such a field.
BY_FIELD = frozenset({GENERATE, ENCODE, CLASSIFY})
BY_NAME = frozenset({CHAT, COMPLETIONS, MESSAGES, INVOCATIONS, EMBEDDINGS})
WITH_FIELD = BY_FIELD | BY_NAME - {MESSAGES}


def with_adapter(path: str, body: bytes, adapter: str, parse: Parse) -> bytes:
    """Return the request, whose model is `base:adapter`, changed so that its route applies the adapter.

    The adapter is also written into `lora_path`, since not every SGLang version reads it from the model.

    Raises:
        CannotServe: the route never applies adapters.
        Exception: any error of `parse`.
    """
    if path not in WITH_FIELD:
        if path in BY_NAME:
            return body
        raise CannotServe(f"{path} ignores LoRA adapters and always uses the base weights")
    own = lora_path_of(body, parse)
    if isinstance(own, list) and own:
        filled = [each or adapter for each in own]
        return body if filled == own else extended(body, {ADAPTER: filled})
    return body if own else extended(body, {ADAPTER: adapter})


def listed_adapters(models: bytes) -> frozenset[str]:
    """Return the adapters in an answer of `/v1/models`; an empty set if it cannot be read."""
    try:
        cards = orjson.loads(models).get("data")
        return frozenset(card["id"] for card in cards if card.get("parent") is not None)
    except (orjson.JSONDecodeError, AttributeError, TypeError, KeyError):
        return frozenset()
