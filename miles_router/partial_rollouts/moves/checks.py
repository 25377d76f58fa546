"""Decide which requests can move: find out what could fail before a generation is aborted. Pure."""

from __future__ import annotations

import string
from collections.abc import Iterable
from typing import Any, Literal

from miles_router.engines.facts import Facts
from miles_router.engines.generate import MEDIA, RID, GenerateRequest, UnknownShape, is_absent
from miles_router.engines.known import PLACES
from miles_router.generation.continuation import check_stateless
from miles_router.generation.generation import CannotResume, ResumableGeneration

Reason = Literal[
    "unreadable",
    "streamed",
    "several",
    "placed",
    "media",
    "unnamed",
    "named_alike",
    "stateful",
    "too_long",
]

#: Engines name requests by 32 hexadecimal digits, and abort all whose name begins with the given one.
LONG_NAME = 16
#: Positions that an engine keeps free: SGLang 0.5.23 takes prompts of up to its context length minus 6.
RESERVED_POSITIONS = 8
#: Upper bound of JSON bytes for a token, as an id or as escaped text.
TOKEN_BYTES = 16


class Immovable(Exception):
    """A request that cannot move. `reason` labels metrics."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


def check_size(body: bytes, engines: Iterable[Facts]) -> None:
    """Check that a body is worth parsing, which blocks the event loop.

    A body with more than `TOKEN_BYTES` for each token of the context has content that text rollouts do not have.

    Raises:
        Immovable: the body is too long.
    """
    if any(len(body) > TOKEN_BYTES * (facts.context_length or 0) for facts in engines):
        raise Immovable("too_long")


def read_movable(body: Any, engines: Iterable[Facts]) -> GenerateRequest:
    """Read a request that any of these engines can resume exactly, wherever it is cut.

    Raises:
        Immovable: the request cannot be resumed for certain.
    """
    try:
        request = GenerateRequest.read(body)
    except UnknownShape:
        raise Immovable("unreadable") from None
    if request.stream:
        raise Immovable("streamed")
    if request.indexed:
        raise Immovable("several")
    if any(request.body.get(name) is not None for name in PLACES):
        raise Immovable("placed")
    if not all(is_absent(request.body.get(name)) for name in MEDIA):
        raise Immovable("media")
    _check_name(request.body.get(RID))
    for facts in engines:
        _check_engine(request, facts)
    return request


def _check_name(rid: object) -> None:
    """Check that an abort by this name cannot hit a generation that the engine named itself.

    Raises:
        Immovable: an abort by this name could hit another generation.
    """
    if not isinstance(rid, str) or not rid:
        raise Immovable("unnamed")
    if len(rid) < LONG_NAME and set(rid) <= set(string.hexdigits):
        raise Immovable("named_alike")


def _check_engine(request: GenerateRequest, facts: Facts) -> None:
    """Check that sampling depends on the tokens alone, and that the context has room for the whole budget.

    Raises:
        Immovable: one of them is not certain.
    """
    generation = ResumableGeneration(request, 0, defaults=facts.preferred_sampling_params)
    try:
        check_stateless(generation)
    except CannotResume:
        raise Immovable("stateful") from None
    prompt, budget = request.prompts[0], generation.budget
    if budget is not None and not isinstance(budget, int):  # the client's own value, which is not checked elsewhere
        raise Immovable("unreadable")
    longest = len(prompt.ids) if prompt.ids is not None else len((prompt.text or "").encode("utf-8", "replace"))
    if budget is None or facts.context_length is None or longest + budget > facts.context_length - RESERVED_POSITIONS:
        raise Immovable("too_long")
