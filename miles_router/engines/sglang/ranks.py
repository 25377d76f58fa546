"""Data-parallel ranks of SGLang: which one a client wants, how a request is pinned to it, and which one answered. Pure.

Source: SGLang 0.5.23, `managers/data_parallel_controller.py`: each rank batches and caches on its own, and requests
that are not pinned to one take turns. `/generate` reads the rank from its body
(`io_struct.GenerateReqInput`), the APIs of others from a header first (`openai/serving_base.py`).
"""

from __future__ import annotations

from miles_router.engines import paths
from miles_router.engines.engine import NO_WISH, Headers, Parse, RankWish
from miles_router.engines.facts import Facts
from miles_router.engines.scan import Field, Incomplete, value_at
from miles_router.engines.sglang.paths import INVOCATIONS
from miles_router.engines.writing import extended

HEADER = b"x-data-parallel-rank"
#: By this one an administrator chooses, where the engine's environment allows it.
OVERRIDE = b"x-override-routed-dp-rank"
#: The newest name first; both are read.
FIELDS = ("routed_dp_rank", "data_parallel_rank")
_QUOTED = tuple(b'"%b"' % name.encode() for name in FIELDS)
#: The paths where the header counts.
BY_HEADER = frozenset({paths.CHAT, paths.COMPLETIONS, paths.MESSAGES, paths.RESPONSES, INVOCATIONS})
MAX_RANKS = 1024
#: The paths whose answers may say which rank gave them; no stream of the latter two does.
TELLING = frozenset({paths.GENERATE, paths.CHAT, INVOCATIONS})
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


def wish(path: str, headers: Headers, body: bytes, parse: Parse) -> RankWish:
    """Return what a request that generates says of ranks. A body that names no rank is not parsed.

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
