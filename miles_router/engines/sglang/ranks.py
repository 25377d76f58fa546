"""Data-parallel ranks of SGLang: how a request is pinned to one of them, and which one answered. Pure.

Source: SGLang 0.5.23, `managers/data_parallel_controller.py`: each rank batches and caches on its own, and requests
that are not pinned to one take turns.
"""

from __future__ import annotations

from miles_router.engines import paths
from miles_router.engines.engine import Headers
from miles_router.engines.facts import Facts
from miles_router.engines.ranks import BY_HEADER, FIELDS, HEADER, MAX_RANKS
from miles_router.engines.scan import Field, Incomplete, value_at
from miles_router.engines.writing import extended

#: The paths whose answers may say which rank gave them; no stream of the latter two does.
TELLING = frozenset({paths.GENERATE, paths.CHAT, paths.INVOCATIONS})
#: Bytes at the end of what has come so far that are looked at: in an answer, and in an event, few fields follow.
_END = 2048
_ANSWERED = Field("dp_rank")


def ranks(facts: Facts) -> int:
    """Return how many ranks requests can be pinned to; 1 where the engine has one, or does not say that it can be told.

    The halves of a pair agree on a prefill half's rank by the room in which they meet, and a pin breaks that
    (`disaggregation/common/conn.py`, `decode.py`).
    """
    if facts.is_half:
        return 1
    told = facts.takes_field("GenerateReqInput", FIELDS[0])
    return facts.dp_size if told and facts.dp_size is not None and facts.dp_size <= MAX_RANKS else 1


def pinned(path: str, headers: Headers, body: bytes, rank: int, *, encoded: bool) -> tuple[Headers, bytes] | None:
    """Return a request as it is sent to one rank; None for a path whose rank the engine chooses, and for a body that is
    `encoded` where it would have to be written into. Nothing is parsed."""
    if path == paths.GENERATE:
        return None if encoded else (headers, extended(body, {FIELDS[0]: rank}))
    if path not in BY_HEADER:
        return None
    return [*(pair for pair in headers if pair[0] != HEADER), (HEADER, b"%d" % rank)], body


class RankScanner:
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


def rank_reader(path: str, *, streamed: bool) -> RankScanner | None:
    """Return what reads from an answer which rank gave it; None where answers to this path do not tell."""
    return RankScanner() if path == paths.GENERATE or (path in TELLING and not streamed) else None
