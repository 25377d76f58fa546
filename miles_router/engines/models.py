"""Model names: the model and the LoRA adapter that a request selects. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress

from miles_router.engines.engine import Parse
from miles_router.engines.json_bytes import Field, Incomplete, value_at
from miles_router.engines.writing import extended

MODEL, ADAPTER = "model", "lora_path"
#: The name that an engine assumes for a request without a model.
DEFAULT = "default"
_MODEL = Field(MODEL)
#: A needlessly escaped letter. Engines decode it in field names too.
_ESCAPED = re.compile(rb"\\u00[4-7]")
_FIRST = re.compile(rb'[ \t\r\n]*\{[ \t\r\n]*"model"[ \t\r\n]*:[ \t\r\n]*')


def model_of(body: bytes, parse: Parse) -> object:
    """Return the `model` of a request body, or None. The body is not parsed if the field is its first or its last.

    Raises:
        Exception: any error of `parse`.
    """
    first, escaped = _FIRST.match(body), _ESCAPED.search(body) is not None
    if not escaped and (first is None or _MODEL.find(body, first.end()) is None):
        with suppress(Incomplete):
            return value_at(body, first.end()) if first is not None else _MODEL.last(body)
    if not escaped and _MODEL.find(body) is None:
        return None
    parsed = parse(body)  # `model` may be nested, such as a parameter of a tool
    return parsed.get(MODEL) if isinstance(parsed, dict) else None


def adapter_of(model: str, names: Iterable[str]) -> tuple[str, str] | None:
    """Return (base, adapter) if `model` is `base:adapter` with a base from `names`, else None. A base may contain
    colons."""
    bases = [name for name in names if model.startswith(f"{name}:")]
    if not bases:
        return None
    base = max(bases, key=len)
    adapter = model[len(base) + 1 :].strip()
    return (base, adapter) if adapter else None


def with_model(body: bytes, model: str) -> bytes:
    """Return the request with this model. The field is appended, since the last one counts."""
    return extended(body, {MODEL: model})


def force_adapter(body: bytes, adapter: str) -> bytes:
    """Return the request with this adapter, whatever adapter it names itself."""
    return extended(body, {MODEL: f"{DEFAULT}:{adapter}", ADAPTER: adapter})


def own_adapters(body: bytes, parse: Parse) -> object:
    """Return the adapter, or list of adapters, in a request's `lora_path`; None if all are empty. Raises any error of
    `parse`."""
    own = lora_path_of(body, parse)
    return own if own and (not isinstance(own, list) or any(own)) else None


def lora_path_of(body: bytes, parse: Parse) -> object:
    """Return the `lora_path` of a request: an adapter, or a list with one per prompt. Raises any error of `parse`."""
    parsed = parse(body) if b'"%b"' % ADAPTER.encode() in body or _ESCAPED.search(body) else None
    return parsed.get(ADAPTER) if isinstance(parsed, dict) else None


def possible_adapters(model: str) -> list[str]:
    """Return the adapter names that an unknown `model` may mean: the whole name, or the part behind a base."""
    return [name for name in (model, model.partition(":")[2].strip()) if name]


def is_encodable(name: str) -> bool:
    """Return whether a name can be encoded as UTF-8; half of a surrogate pair cannot."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
