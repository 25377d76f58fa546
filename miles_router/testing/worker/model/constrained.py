"""Constrained sampling without a grammar engine: generate a matching text, then tokenize it in an unusual way."""

import importlib
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from miles_router.testing.worker.model.vocabulary import Tokenizer
from miles_router.testing.worker.wire.sampling_params import SamplingParams

_WORDS = ("alpha", "Paris", "naïve", "世界", "42", "x_1", "a b")
_MOST_REPEATS = 8


def script_for(sampling: SamplingParams, tokenizer: Tokenizer, seed: int) -> list[int] | None:
    """Return ids that satisfy the request's `json_schema` or `regex`, with a stop id at the end, or None without these.

    Raises:
        ValueError: the request has `ebnf` or `structural_tag`, which are not simulated.
    """
    source = random.Random(seed)
    if sampling.json_schema is not None:
        text = orjson.dumps(instance_of(orjson.loads(sampling.json_schema), source)).decode()
    elif sampling.regex is not None:
        text = text_matching(sampling.regex, source)
    elif sampling.ebnf is not None or sampling.structural_tag is not None:
        raise ValueError("the simulated worker has no grammars: use json_schema or regex")
    else:
        return None
    return [*spelled(text, tokenizer, source), stop_id(tokenizer)]


def stop_id(tokenizer: Tokenizer) -> int:
    """Return the stop id for scripted answers."""
    return max(tokenizer.eos_token_ids)


def spelled(text: str, tokenizer: Tokenizer, source: random.Random) -> list[int]:
    """Encode a text in random pieces, which gives ids that encoding the whole text would rarely give."""
    ids: list[int] = []
    start = 0
    while start < len(text):
        end = start + source.randint(1, 5)
        ids += tokenizer.encode(text[start:end])
        start = end
    return ids


def instance_of(schema: Mapping[str, Any], source: random.Random) -> Any:
    """Return a random value that fits a JSON schema. Supported: types, properties, items, enum, const, anyOf, oneOf."""
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return source.choice(schema["enum"])
    for choice in ("anyOf", "oneOf"):
        if choice in schema:
            return instance_of(source.choice(schema[choice]), source)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if isinstance(kind, list):
        kind = source.choice(kind)
    return _instance_of_type(str(kind), schema, source)


def _instance_of_type(kind: str, schema: Mapping[str, Any], source: random.Random) -> Any:
    if kind == "object":
        properties = schema.get("properties", {})
        return {name: instance_of(part, source) for name, part in properties.items()}
    if kind == "array":
        count = max(schema.get("minItems", 1), 1)
        return [instance_of(schema.get("items", {}), source) for _ in range(count)]
    if kind in ("integer", "number"):
        return source.randint(int(schema.get("minimum", 0)), int(schema.get("maximum", 99)))
    if kind == "boolean":
        return source.random() < 0.5
    if kind == "null":
        return None
    return text_matching(schema["pattern"], source) if "pattern" in schema else source.choice(_WORDS)


def text_matching(pattern: str, source: random.Random) -> str:
    """Return a random text that a regular expression matches completely.

    Raises:
        ValueError: the expression uses an unsupported feature.
    """
    # Python 3.11 moved the parser of `re`; the old module name raises a warning.
    module = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
    return _text_of_parts(module.parse(pattern), source)


def _text_of_parts(parts: Sequence[Any], source: random.Random) -> str:
    return "".join(_text_of_part(str(operation), argument, source) for operation, argument in parts)


def _text_of_part(operation: str, argument: Any, source: random.Random) -> str:
    if operation == "LITERAL":
        return chr(argument)
    if operation == "IN":
        return _member(argument, source)
    if operation == "ANY":
        return source.choice("abc xyz")
    if operation == "BRANCH":
        return _text_of_parts(source.choice(argument[1]), source)
    if operation == "SUBPATTERN":
        return _text_of_parts(argument[-1], source)
    if operation in ("MAX_REPEAT", "MIN_REPEAT"):
        least, most, inner = argument
        return "".join(_text_of_parts(inner, source) for _ in range(source.randint(least, _bounded(least, most))))
    if operation == "AT":
        return ""
    raise ValueError(f"the simulated worker cannot make up a text for {operation} in a regular expression")


def _bounded(least: int, most: Any) -> int:
    return max(least, min(int(most), _MOST_REPEATS))


_CATEGORIES = {"CATEGORY_DIGIT": "0123456789", "CATEGORY_WORD": "abz_09", "CATEGORY_SPACE": " "}


def _member(members: Sequence[Any], source: random.Random) -> str:
    operation, argument = source.choice(members)
    if str(operation) == "LITERAL":
        return chr(argument)
    if str(operation) == "RANGE":
        return chr(source.randint(*argument))
    if str(operation) == "CATEGORY" and str(argument) in _CATEGORIES:
        return source.choice(_CATEGORIES[str(argument)])
    return "~"
