"""Models by name: which one a request asks for, and how an adapter of one is spelled for each route. Pure.

Source: SGLang 0.5.23. `openai/serving_base.py` takes `base:adapter` for an adapter, and any other name for the base
weights, without a word; `/generate` ignores the model and has `lora_path`; `openai/serving_responses.py` accepts the
name of an adapter and never applies it, and so do the APIs of Ollama.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress

import orjson

from miles_router.engines import paths
from miles_router.engines.engine import CannotServe, Parse
from miles_router.engines.scan import Field, Incomplete, value_at
from miles_router.engines.writing import extended

MODEL, ADAPTER = "model", "lora_path"
#: The name of an adapter, where it is told of or loaded.
ADAPTER_NAME = "lora_name"
#: What an engine calls the model of a request that names none.
DEFAULT = "default"
#: Paths where an adapter has a field, and the model says nothing; those where `base:adapter` is applied; all with a
#: field.
BY_FIELD = frozenset({paths.GENERATE, paths.ENCODE, paths.CLASSIFY})
BY_NAME = frozenset({paths.CHAT, paths.COMPLETIONS, paths.MESSAGES, paths.INVOCATIONS, paths.EMBEDDINGS})
WITH_FIELD = BY_FIELD | BY_NAME - {paths.MESSAGES}
_MODEL = Field(MODEL)
#: A letter that is escaped without need: in a name, too, an engine reads it.
_ESCAPED = re.compile(rb"\\u00[4-7]")
_FIRST = re.compile(rb'[ \t\r\n]*\{[ \t\r\n]*"model"[ \t\r\n]*:[ \t\r\n]*')


def model_of(body: bytes, parse: Parse) -> object:
    """The model that a request's body names; None where it names none. Nothing is parsed where it stands first or last.

    Raises:
        What `parse` raises.
    """
    first, escaped = _FIRST.match(body), _ESCAPED.search(body) is not None
    if not escaped and (first is None or _MODEL.find(body, first.end()) is None):
        with suppress(Incomplete):
            return value_at(body, first.end()) if first is not None else _MODEL.last(body)
    if not escaped and _MODEL.find(body) is None:
        return None
    parsed = parse(body)  # it may be part of something else, as a parameter of a tool
    return parsed.get(MODEL) if isinstance(parsed, dict) else None


def adapter_of(model: str, names: Iterable[str]) -> tuple[str, str] | None:
    """The base model, which is one of `names`, and the adapter, where a model is written as `base:adapter`. A base may
    have colons itself."""
    bases = [name for name in names if model.startswith(f"{name}:")]
    if not bases:
        return None
    base = max(bases, key=len)
    adapter = model[len(base) + 1 :].strip()
    return (base, adapter) if adapter else None


def with_model(body: bytes, model: str) -> bytes:
    """A request for this model: behind its own fields, where it counts."""
    return extended(body, {MODEL: model})


def only_with_adapter(body: bytes, adapter: str) -> bytes:
    """A request that is answered with this adapter, whichever it names itself."""
    return extended(body, {MODEL: f"{DEFAULT}:{adapter}", ADAPTER: adapter})


def with_adapter(path: str, body: bytes, adapter: str, parse: Parse) -> bytes:
    """A request whose model is written as `base:adapter`, so that its route applies the adapter: said in each way that
    there is for it, for not every engine reads the model.

    Raises:
        CannotServe: the route never does.
        What `parse` raises.
    """
    if path not in WITH_FIELD:
        if path in BY_NAME:
            return body
        raise CannotServe(f"{path} answers with base weights whatever adapter is named")
    own = _adapters_of(body, parse)
    if isinstance(own, list) and own:
        filled = [each or adapter for each in own]
        return body if filled == own else extended(body, {ADAPTER: filled})
    return body if own else extended(body, {ADAPTER: adapter})


def own_adapters(body: bytes, parse: Parse) -> object:
    """What a request names as its adapter, or adapters, beside its model; None where that is none. Raises what `parse`
    raises."""
    own = _adapters_of(body, parse)
    return own if own and (not isinstance(own, list) or any(own)) else None


def _adapters_of(body: bytes, parse: Parse) -> object:
    parsed = parse(body) if b'"%b"' % ADAPTER.encode() in body or _ESCAPED.search(body) else None
    return parsed.get(ADAPTER) if isinstance(parsed, dict) else None


def possible_adapters(model: str) -> list[str]:
    """The adapters that a model which nobody knows may name, with any base before it."""
    return [name for name in (model, model.partition(":")[2].strip()) if name]


def is_written(name: str) -> bool:
    """Whether a name can be written: half of a surrogate pair cannot."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def adapters(models: bytes) -> frozenset[str]:
    """The adapters in an answer to `/v1/models`; none in what cannot be read."""
    try:
        cards = orjson.loads(models).get("data")
        return frozenset(card["id"] for card in cards if card.get("parent") is not None)
    except (orjson.JSONDecodeError, AttributeError, TypeError, KeyError):
        return frozenset()
