"""Data-parallel ranks: which of the schedulers behind one address a request is for, and which one answered it. Pure.

Source: SGLang 0.5.23, `io_struct.GenerateReqInput`, `openai/serving_base.py`, `managers/data_parallel_controller.py`:
each rank batches and caches on its own, and requests that are not pinned to one take turns. `/generate` reads the rank
from its body, the APIs of others from a header first.
"""

from __future__ import annotations

from typing import NamedTuple

from miles_router.engines import paths
from miles_router.engines.engine import Parse
from miles_router.engines.facts import Facts
from miles_router.engines.scan import Field, Incomplete, value_at
from miles_router.engines.writing import extended

Headers = list[tuple[bytes, bytes]]

HEADER = b"x-data-parallel-rank"
#: By this one an administrator chooses, where the engine's environment allows it.
OVERRIDE = b"x-override-routed-dp-rank"
#: The newest name first; both are read.
FIELDS = ("routed_dp_rank", "data_parallel_rank")
_QUOTED = tuple(b'"%b"' % name.encode() for name in FIELDS)
#: The paths where the header counts.
BY_HEADER = frozenset({paths.CHAT, paths.COMPLETIONS, paths.MESSAGES, paths.RESPONSES, paths.INVOCATIONS})
#: The paths whose answers may say which rank gave them; no stream of the latter two does.
TELLING = frozenset({paths.GENERATE, paths.CHAT, paths.INVOCATIONS})
MAX_RANKS = 1024
#: Bytes at the end of what has come so far that are looked at: in an answer, and in an event, few fields follow.
_END = 2048
_ANSWERED = Field("dp_rank")


def ranks(facts: Facts) -> int:
    """How many ranks requests can be pinned to; 1 where the engine has one, or does not say that it can be told. The
    halves of a pair agree on a prefill half's rank by the room in which they meet, and a pin breaks that
    (`disaggregation/common/conn.py`, `decode.py`)."""
    if facts.is_half:
        return 1
    told = facts.takes_field("GenerateReqInput", FIELDS[0])
    return facts.dp_size if told and facts.dp_size is not None and facts.dp_size <= MAX_RANKS else 1


def can_pin(path: str) -> bool:
    """Whether requests to a path that generates can be pinned; for others the engine chooses."""
    return path == paths.GENERATE or path in BY_HEADER


class RankWish(NamedTuple):
    """What a client's request says of ranks."""

    #: None: nothing, or nothing that can be known here.
    rank: int | None
    #: It stands where the engine reads it, so that nothing needs to be added.
    heeded: bool


NO_WISH = RankWish(None, False)


def wish(path: str, headers: Headers, body: bytes, parse: Parse) -> RankWish:
    """What a request that generates says of ranks. A body that names no rank is not parsed.

    Raises:
        What `parse` raises.
    """
    header = None
    for name, value in headers:
        if name == OVERRIDE:
            return RankWish(None, True)
        if name == HEADER:
            header = value
    if path in BY_HEADER and header is not None:
        return RankWish(_rank(header), True)
    field = _field(body, parse)
    if field is not None:
        return RankWish(field if type(field) is int else None, True)
    return NO_WISH if header is None else RankWish(_rank(header), False)


def _rank(header: bytes) -> int | None:
    return int(header) if header.isdigit() and len(header) < len(str(MAX_RANKS)) else None


def _field(body: bytes, parse: Parse) -> object:
    if not any(name in body for name in _QUOTED):
        return None
    parsed = parse(body)
    return (
        next((parsed[name] for name in FIELDS if parsed.get(name) is not None), None)
        if isinstance(parsed, dict)
        else None
    )


def pinned(path: str, headers: Headers, body: bytes, rank: int) -> tuple[Headers, bytes]:
    """A request to a path that can be pinned, for this rank. Nothing is parsed."""
    if path == paths.GENERATE:
        return headers, extended(body, {FIELDS[0]: rank})
    return [*(pair for pair in headers if pair[0] != HEADER), (HEADER, b"%d" % rank)], body


class RankReader:
    """Reads an answer as it arrives, as little of it as shows the rank that gave it."""

    __slots__ = ("_end",)

    def __init__(self) -> None:
        self._end = b""

    def feed(self, data: bytes) -> int | None:
        """The rank that answers, where the next piece shows it."""
        self._end = (self._end + data[-_END:])[-_END:]
        for at in _ANSWERED.places(self._end):
            try:
                rank = value_at(self._end, at)
            except Incomplete:
                return None
            if type(rank) is int:
                return rank
        return None
