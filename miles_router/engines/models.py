"""Models by name: which one a request asks for, and which adapter of one. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress

from miles_router.engines.engine import Parse
from miles_router.engines.scan import Field, Incomplete, value_at
from miles_router.engines.writing import extended

MODEL, ADAPTER = "model", "lora_path"
#: What an engine calls the model of a request that names none.
DEFAULT = "default"
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


def own_adapters(body: bytes, parse: Parse) -> object:
    """What a request names as its adapter, or adapters, beside its model; None where that is none. Raises what `parse`
    raises."""
    own = adapters_in(body, parse)
    return own if own and (not isinstance(own, list) or any(own)) else None


def adapters_in(body: bytes, parse: Parse) -> object:
    """The field of a request that names its adapter, or one for each of its prompts. Raises what `parse` raises."""
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
