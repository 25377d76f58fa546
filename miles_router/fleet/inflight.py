"""The requests that are being answered now, so that an abort finds the one it means. Pure.

Bodies are not parsed on their way: an abort looks for its `rid` among the bodies in flight, and pays for that itself.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import orjson

from miles_router.asgi.exchange import Exchange
from miles_router.engines.events import LAST_EVENT, event
from miles_router.errors import BadRequest

MAX_GENERATIONS = 4096  # of one request
#: What comes of a body that is no request for an engine.
NOT_UNDERSTOOD = (BadRequest, AttributeError, IndexError, KeyError, TypeError, ValueError)
IN_THE_QUEUE = {"type": "abort", "message": "Abort in waiting queue"}  # SGLang's words
#: An id, or a list of ids, that is spelled with an escape, so that it has to be read before anybody knows it.
ESCAPED = re.compile(rb'"rid"\s*:\s*(?:\[(?:[^]"\\]|"[^"\\]*")*)?"[^"\\]*\\')
LOGPROBS = ("input_token_logprobs", "output_token_logprobs")


class InFlight:
    """Exchanges by identity, each for as long as some layer holds it."""

    def __init__(self) -> None:
        self._bodies: dict[Exchange, bytes] = {}
        self._holders: dict[Exchange, int] = {}

    def __len__(self) -> int:
        return len(self._bodies)

    def enter(self, exchange: Exchange, body: bytes) -> None:
        """A layer begins to answer a request; the body is the one it sends, for those who look for an id in it."""
        self._bodies[exchange] = body
        self._holders[exchange] = self._holders.get(exchange, 0) + 1

    def leave(self, exchange: Exchange) -> None:
        """It is done with it."""
        self._holders[exchange] -= 1
        if not self._holders[exchange]:
            del self._holders[exchange], self._bodies[exchange]

    def abort(self, rid: str | None) -> list[Exchange]:
        """Mark the requests that an abort means (all for None), so that nothing carries them on; give them.

        SGLang aborts every generation whose id begins with `rid`, on workers where one has exactly this id, and so does
        this. One of several generations ends the carrying on of all; a request that no worker has had is ended whole or
        not at all.
        """
        found = list(self._bodies) if rid is None else self._meant(rid)
        for exchange in found:
            exchange.flight.aborted = True
        return found

    def _meant(self, rid: str) -> list[Exchange]:
        ids = {exchange: _ids(exchange, body, rid) for exchange, body in self._bodies.items()}
        where = {exchange.flight.worker_url for exchange, own in ids.items() if rid in own}
        return [
            exchange
            for exchange, own in ids.items()
            if own and exchange.flight.worker_url in where and _enough(exchange)(each.startswith(rid) for each in own)
        ]


def _enough(exchange: Exchange) -> Callable[[Iterable[bool]], bool]:
    return all if exchange.flight.worker_url is None else any


def _ids(exchange: Exchange, body: bytes, rid: str) -> set[str]:
    """The ids of a request's generations; those in its body only if `rid` could be one of them."""
    if orjson.dumps(re.sub(r"_\d+$", "", rid))[:-1] not in body and ESCAPED.search(body) is None:
        return exchange.flight.rids
    try:
        return exchange.flight.rids | {each for each in _named(exchange.loads(body))[0] if isinstance(each, str)}
    except NOT_UNDERSTOOD:
        return exchange.flight.rids


def _named(body: Mapping[str, Any]) -> tuple[list[str | None], bool]:
    """The id of each generation of a request, None where the engine makes one, and whether they are answered as a list.

    Raises:
        one of `NOT_UNDERSTOOD`: it is no request for an engine.
    """
    given, sampling = body.get("rid"), body.get("sampling_params") or {}
    ids = body.get("input_ids", body.get("input_tokens"))
    prompts: Any = given if isinstance(given, list) else ids or body.get("text")
    listed = isinstance(prompts, list) and not (prompts and isinstance(prompts[0], int))
    named: list[str | None] = []
    for place in range(len(prompts) if listed else 1):
        samples = (sampling[place] if isinstance(sampling, list) else sampling).get("n", 1)
        if len(named) + samples > MAX_GENERATIONS:
            raise ValueError(f"more than {MAX_GENERATIONS} generations")
        if samples != 1:  # the engine makes the ids then
            named += [None] * samples
        elif isinstance(given, list):
            named.append(given[place])
        else:
            named.append(f"{given}_{place}" if listed and given is not None else given)
    return named, listed or len(named) != 1


def aborted_in_the_queue(body: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """What SGLang says to a `/generate` that it aborts before it has begun: content type and body.

    Raises:
        one of `NOT_UNDERSTOOD`: it is no request for an engine.
    """
    named, listed = _named(body)
    nothing: dict[str, Any] = {name: [] for name in LOGPROBS} if body.get("return_logprob") else {}
    answers: list[dict[str, Any]] = []
    for rid in named:
        meta = {"id": rid or uuid.uuid4().hex, "finish_reason": IN_THE_QUEUE, "completion_tokens": 0, **nothing}
        answers.append({"text": "", "output_ids": [], "meta_info": meta})
    if not body.get("stream"):
        return b"application/json", orjson.dumps(answers if listed else answers[0])
    events = [event({**each, "index": place} if listed else each) for place, each in enumerate(answers)]
    return b"text/event-stream; charset=utf-8", b"".join([*events, LAST_EVENT])
