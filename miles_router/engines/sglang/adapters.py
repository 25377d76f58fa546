"""LoRA adapters of SGLang: how each route is told of one, and which there are. Pure.

Source: SGLang 0.5.23. `openai/serving_base.py` takes `base:adapter` for an adapter, and any other name for the base
weights, without a word; `/generate` ignores the model and has `lora_path`; `openai/serving_responses.py` accepts the
name of an adapter and never applies it, and so do the APIs of Ollama.
"""

from __future__ import annotations

import orjson

from miles_router.engines.engine import CannotServe, Parse
from miles_router.engines.models import ADAPTER, adapters_in
from miles_router.engines.paths import CHAT, COMPLETIONS, EMBEDDINGS, GENERATE, MESSAGES
from miles_router.engines.sglang.paths import CLASSIFY, ENCODE, INVOCATIONS
from miles_router.engines.writing import extended

#: The name of an adapter, where it is told of or loaded.
NAME = "lora_name"
#: Where it is loaded from.
PATH = ADAPTER
#: Paths where an adapter has a field, and the model says nothing; those where `base:adapter` is applied; all with a
#: field.
BY_FIELD = frozenset({GENERATE, ENCODE, CLASSIFY})
BY_NAME = frozenset({CHAT, COMPLETIONS, MESSAGES, INVOCATIONS, EMBEDDINGS})
WITH_FIELD = BY_FIELD | BY_NAME - {MESSAGES}


def with_adapter(path: str, body: bytes, adapter: str, parse: Parse) -> bytes:
    """Return a request whose model is written as `base:adapter` so that its route applies the adapter: said in each way
    that there is for it, for not every version reads the model.

    Raises:
        CannotServe: the route never does.
        What `parse` raises.
    """
    if path not in WITH_FIELD:
        if path in BY_NAME:
            return body
        raise CannotServe(f"{path} answers with base weights whatever adapter is named")
    own = adapters_in(body, parse)
    if isinstance(own, list) and own:
        filled = [each or adapter for each in own]
        return body if filled == own else extended(body, {ADAPTER: filled})
    return body if own else extended(body, {ADAPTER: adapter})


def told_adapters(models: bytes) -> frozenset[str]:
    """Return the adapters in an answer to `/v1/models`; none in what cannot be read."""
    try:
        cards = orjson.loads(models).get("data")
        return frozenset(card["id"] for card in cards if card.get("parent") is not None)
    except (orjson.JSONDecodeError, AttributeError, TypeError, KeyError):
        return frozenset()
