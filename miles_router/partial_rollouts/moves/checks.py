"""Which requests can move: what could fail once a generation is aborted is found out before. Pure."""

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

#: An engine makes names of 32 hexadecimal digits, and aborts all that begin with the one it is told.
LONG_NAME = 16
#: Positions that an engine keeps free behind a prompt: SGLang 0.5.23 takes one that is 6 shorter than its context.
ROOM = 8
#: Bytes of JSON that a token has at the most, as an id or as escaped text.
TOKEN_BYTES = 16


class Immovable(Exception):
    """A request that stays where it is. `reason` is one of few words, which label metrics."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


def check_size(body: bytes, engines: Iterable[Facts]) -> None:
    """See that a body is worth reading, which holds everybody up: beside `TOKEN_BYTES` for each token of the context it
    has what no text rollout has.

    Raises:
        Immovable: it is too long.
    """
    if any(len(body) > TOKEN_BYTES * (facts.context_length or 0) for facts in engines):
        raise Immovable("too_long")


def movable(body: Any, engines: Iterable[Facts]) -> GenerateRequest:
    """A request that any of these engines can carry on exactly, wherever it is cut.

    Raises:
        Immovable: it is none.
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
    """See that an abort by its name can mean nothing that the engine has named.

    Raises:
        Immovable: it may.
    """
    if not isinstance(rid, str) or not rid:
        raise Immovable("unnamed")
    if len(rid) < LONG_NAME and set(rid) <= set(string.hexdigits):
        raise Immovable("named_alike")


def _check_engine(request: GenerateRequest, facts: Facts) -> None:
    """See that what follows depends on the tokens alone, and that there is room for it behind all of them.

    Raises:
        Immovable: not for certain.
    """
    generation = ResumableGeneration(request, 0, defaults=facts.preferred_sampling_params)
    try:
        check_stateless(generation)
    except CannotResume:
        raise Immovable("stateful") from None
    prompt, budget = request.prompts[0], generation.budget
    if budget is not None and not isinstance(budget, int):  # as its client wrote it
        raise Immovable("unreadable")
    longest = len(prompt.ids) if prompt.ids is not None else len((prompt.text or "").encode("utf-8", "replace"))
    if budget is None or facts.context_length is None or longest + budget > facts.context_length - ROOM:
        raise Immovable("too_long")
