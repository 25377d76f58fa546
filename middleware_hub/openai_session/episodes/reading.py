"""Read a contract from JSON. Unknown and invalid fields are refused by name. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from middleware_hub.openai_session.episodes.contract import (
    MARK,
    NO_CONTRACT,
    REFUSE,
    REPLACE,
    WAIT,
    Budget,
    Contract,
    Freshness,
    Model,
)
from miles_router.engines.answers import ASKS_FOR_MASK
from miles_router.errors import BadRequest

#: The longest deadline in seconds: a year.
LONGEST = 366 * 24 * 3600.0
#: The longest name in characters.
MAX_NAME = 256
Check = Callable[[Any], bool]


def _count(value: Any) -> bool:
    return type(value) is int and 1 <= value < 1 << 53


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _seconds(value: Any) -> bool:
    return _number(value) and 0 < value <= LONGEST


def _name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME and value.isprintable()


def _model_name(value: Any) -> bool:
    return _name(value) and ":" not in value  # SGLang reads an adapter's name behind the colon


def _stops(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(each, str) for each in value))


def _biases(value: Any) -> bool:
    return isinstance(value, dict) and all(_number(each) for each in value.values())


def _version(value: Any) -> bool:
    return (type(value) is int and value >= 0) or (isinstance(value, str) and value.isdecimal() and value.isascii())


COUNT, NUMBER = (_count, "a whole number from 1"), (_number, "a number")
Fields = Mapping[str, tuple[Check, str]]
BUDGET: Fields = {
    "max_tokens": COUNT,
    "max_context": COUNT,
    "max_turns": COUNT,
    "deadline_s": (_seconds, f"seconds, above 0 and at most {LONGEST:.0f}"),
}
SAMPLING: Fields = {
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": (lambda value: type(value) is int, "a whole number"),
    "min_p": NUMBER,
    "stop": (_stops, "a string or a list of strings"),
    "frequency_penalty": NUMBER,
    "presence_penalty": NUMBER,
    "repetition_penalty": NUMBER,
    "logit_bias": (_biases, "an object of numbers"),
    ASKS_FOR_MASK: (lambda value: isinstance(value, bool), "true or false"),
}
MODEL: Fields = {
    "name": (_model_name, f"a string of 1 to {MAX_NAME} characters without a colon"),
    "lora": (_name, f"a string of 1 to {MAX_NAME} characters"),
}
FRESHNESS: Fields = {
    "oldest_version": (_version, "a whole number, or one in a string"),
    "otherwise": (lambda value: value in (REFUSE, MARK), f"{REFUSE!r} or {MARK!r}"),
}
EVALUATION: Fields = {"otherwise": (lambda value: value in (REFUSE, WAIT), f"{REFUSE!r} or {WAIT!r}")}
PARTS = tuple(each.name for each in fields(Contract) if each.name != "given")


def read_contract(given: object) -> Contract:
    """Return the contract with this JSON; `NO_CONTRACT` for None.

    Raises:
        BadRequest: a field is unknown or invalid; the message names it.
    """
    if given is None:
        return NO_CONTRACT
    parts = _checked_fields("contract", given, PARTS)
    budget = _read("contract.budget", parts.get("budget"), BUDGET)
    sampling = _read("contract.sampling", parts.get("sampling"), SAMPLING)
    # SGLang 0.5.23 answers every turn with 400: it makes no mask without a `top_k`, except for greedy sampling.
    if sampling.get(ASKS_FOR_MASK) and sampling.get("top_k", 1) < 1 and sampling.get("temperature") != 0:
        raise BadRequest(f"contract.sampling: {ASKS_FOR_MASK} needs a top_k of at least 1, not {sampling['top_k']}")
    model = _read("contract.model", parts.get("model"), MODEL)
    freshness = _read("contract.freshness", parts.get("freshness"), FRESHNESS)
    if freshness and "oldest_version" not in freshness:
        raise BadRequest("contract.freshness: oldest_version is required")
    if "oldest_version" in freshness:
        freshness["oldest_version"] = int(freshness["oldest_version"])
    key = False if parts.get("key") is None else parts["key"]
    if not isinstance(key, bool):
        raise BadRequest("contract.key must be true or false: the router makes the key")
    media = parts.get("media")
    if media not in (None, REFUSE, REPLACE):
        raise BadRequest(f"contract.media must be {REFUSE!r} or {REPLACE!r}")
    group = parts.get("group")
    if group is not None and not _is_group(group):
        raise BadRequest(f"contract.group must be a whole number, or a string of 1 to {MAX_NAME} characters")
    evaluation = _read_evaluation(parts.get("evaluation"))
    about = (media, key, group, evaluation)
    return Contract(Budget(**budget), sampling, Model(**model), Freshness(**freshness), *about, dict(parts))


def with_evaluation(contract: object, evaluation: object) -> object:
    """Return the JSON of a contract with the field `evaluation` from outside of it; None for none of both.

    Raises:
        BadRequest: the contract has the field too, with another value.
    """
    if evaluation is None or not isinstance(contract, (Mapping, type(None))):
        return contract
    if contract and contract.get("evaluation") not in (None, evaluation):
        raise BadRequest("evaluation and contract.evaluation differ; give one of them")
    return contract if evaluation is False else {**(contract or {}), "evaluation": evaluation}


def _read_evaluation(given: object) -> str | None:
    if given is None or isinstance(given, bool):
        return REFUSE if given else None
    if not isinstance(given, Mapping):
        raise BadRequest("contract.evaluation must be true, false or an object")
    otherwise: str = _read("contract.evaluation", given, EVALUATION).get("otherwise", REFUSE)
    return otherwise


def _is_group(value: object) -> bool:
    return (isinstance(value, str) and 0 < len(value) <= MAX_NAME) or type(value) is int


def _checked_fields(where: str, given: object, known: Sequence[str] | Fields) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise BadRequest(f"{where} must be an object")
    if unknown := given.keys() - set(known):
        raise BadRequest(f"unknown field {where}.{min(unknown)}; known are {', '.join(known)}")
    return given


def _read(where: str, given: object, known: Fields) -> dict[str, Any]:
    if given is None:
        return {}
    read = {name: value for name, value in _checked_fields(where, given, known).items() if value is not None}
    for name, value in read.items():
        check, words = known[name]
        if not check(value):
            raise BadRequest(f"{where}.{name} must be {words}")
    return read
