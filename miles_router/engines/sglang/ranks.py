"""Data-parallel ranks of SGLang: the client's wish, the pin of a request, and the rank that answered. No I/O.

Source: SGLang 0.5.23, `managers/data_parallel_controller.py`: each rank batches and caches on its own, and requests
without a pin go round-robin. `/generate` reads the rank from its body (`io_struct.GenerateReqInput`), the APIs of
OpenAI and Anthropic from a header first (`openai/serving_base.py`).
"""

from __future__ import annotations

from miles_router.engines import paths
from miles_router.engines.engine import NO_WISH, Headers, Parse, RankWish
from miles_router.engines.facts import Facts
from miles_router.engines.json_bytes import Field, Incomplete, value_at
from miles_router.engines.sglang.paths import INVOCATIONS
from miles_router.engines.writing import extended

HEADER = b"x-data-parallel-rank"
#: The header by which an administrator chooses, if the engine's environment allows it.
OVERRIDE = b"x-override-routed-dp-rank"
#: Newest name first; SGLang reads both.
FIELDS = ("routed_dp_rank", "data_parallel_rank")
_QUOTED = tuple(b'"%b"' % name.encode() for name in FIELDS)
#: Paths where SGLang reads the header.
BY_HEADER = frozenset({paths.CHAT, paths.COMPLETIONS, paths.MESSAGES, paths.RESPONSES, INVOCATIONS})
MAX_RANKS = 1024
#: Paths whose answers may contain the rank; streams of the latter two do not.
RANK_IN_ANSWER = frozenset({paths.GENERATE, paths.CHAT, INVOCATIONS})
#: The number of last bytes that are scanned: only few fields follow the rank in an answer or event.
_END = 2048
_ANSWERED = Field("dp_rank")


def ranks(facts: Facts) -> int:
    """Return the number of ranks that requests can be pinned to; 1 if there is one, or if pinning is not supported.

    The halves of a pair derive the rank of the prefill half from the room, and a pin breaks that
    (`disaggregation/common/conn.py`, `decode.py`).
    """
    if facts.is_half:
        return 1
    has_field = facts.takes_field("GenerateReqInput", FIELDS[0])
    return facts.dp_size if has_field and facts.dp_size is not None and facts.dp_size <= MAX_RANKS else 1


def wish(path: str, headers: Headers, body: bytes, parse: Parse) -> RankWish:
    """Return the rank that a generation request asks for. A body that names no rank is not parsed.

    Raises:
        Exception: any error of `parse`.
    """
    header = None
    for name, value in headers:
        if name == OVERRIDE:
            return RankWish(None, True)
        if name == HEADER:
            header = value
    if path in BY_HEADER and header is not None:
        return RankWish(_rank(header), True)
    field = _rank_field(body, parse)
    if field is not None:
        return RankWish(field if type(field) is int else None, True)
    return NO_WISH if header is None else RankWish(_rank(header), False)


def _rank(header: bytes) -> int | None:
    return int(header) if header.isdigit() and len(header) < len(str(MAX_RANKS)) else None


def _rank_field(body: bytes, parse: Parse) -> object:
    if not any(name in body for name in _QUOTED):
        return None
    parsed = parse(body)
    return (
        next((parsed[name] for name in FIELDS if parsed.get(name) is not None), None)
        if isinstance(parsed, dict)
        else None
    )


def pinned(path: str, headers: Headers, body: bytes, rank: int, *, encoded: bool) -> tuple[Headers, bytes] | None:
    """Return the headers and body that pin a request to one rank. Nothing is parsed. None for a path whose rank the
    engine chooses, and for an `encoded` (compressed) body that would need a field."""
    if path == paths.GENERATE:
        return None if encoded else (headers, extended(body, {FIELDS[0]: rank}))
    if path not in BY_HEADER:
        return None
    return [*(pair for pair in headers if pair[0] != HEADER), (HEADER, b"%d" % rank)], body


class RankScanner:
    """A reader that finds the answering rank in an answer while it arrives."""

    __slots__ = ("_end",)

    def __init__(self) -> None:
        self._end = b""

    def feed(self, data: bytes) -> int | None:
        self._end = (self._end + data[-_END:])[-_END:]
        for at in _ANSWERED.places(self._end):
            try:
                rank = value_at(self._end, at)
            except Incomplete:
                return None
            if type(rank) is int:
                return rank
        return None


def rank_scanner(path: str, *, streamed: bool) -> RankScanner | None:
    """Return a reader for the answering rank; None if answers to this path do not contain it."""
    return RankScanner() if path == paths.GENERATE or (path in RANK_IN_ANSWER and not streamed) else None
