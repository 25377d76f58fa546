"""The parts of a turn (waits, generations), computed from the marks of its request. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from miles_router.middlewares.generation import Mark


class TurnPart(NamedTuple):
    """A part of a turn. Times come from `time.perf_counter()`."""

    name: str
    began_at: float
    ended_at: float
    worker: Mapping[str, Any]


def parts_of(marks: Iterable[Mark], ended_at: float) -> Iterator[TurnPart]:
    """Yield the waits, the times to the first byte and the generations. A part without an end ends at `ended_at`."""
    chosen: dict[int, tuple[float, Mapping[str, Any]]] = {}
    replying: dict[int, tuple[float, Mapping[str, Any]]] = {}
    for mark in marks:
        if mark.name in ("gate", "queue"):
            yield TurnPart(mark.name, mark.at - mark.facts["seconds"], mark.at, {})
        elif mark.name == "worker_chosen":  # repeated if a worker was lost
            chosen[mark.request] = chosen.get(mark.request, (mark.at,))[0], mark.facts
        elif mark.name == "not_admitted":  # the request was not sent
            chosen.pop(mark.request, None)
        elif mark.name == "first_byte":
            began_at, _ = chosen.pop(mark.request, (mark.at, {}))
            yield TurnPart("first_byte", began_at, mark.at, mark.facts)
            replying[mark.request] = mark.at, mark.facts
        elif mark.name == "reply_ended" and mark.request in replying:
            began_at, worker = replying.pop(mark.request)
            yield TurnPart("generation", began_at, mark.at, worker)
    for began_at, worker in chosen.values():
        yield TurnPart("first_byte", began_at, ended_at, worker)
    for began_at, worker in replying.values():
        yield TurnPart("generation", began_at, ended_at, worker)


def around(parts: Sequence[TurnPart], began_at: float, ended_at: float) -> Iterator[TurnPart]:
    """Yield the parts of a turn that a middleware records, between its own times (`prepare` and `parsing`)."""
    if parts:
        yield TurnPart("prepare", began_at, parts[0].began_at, {})
    yield from parts
    if any(part.worker for part in parts):
        yield TurnPart("parsing", max(part.ended_at for part in parts), ended_at, {})
