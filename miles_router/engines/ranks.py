"""Which data-parallel rank a client's request is for. Pure.

Source: SGLang 0.5.23, `io_struct.GenerateReqInput`, `openai/serving_base.py`: `/generate` reads the rank from its body,
the APIs of others from a header first.
"""

from __future__ import annotations

from typing import NamedTuple

from miles_router.engines import paths
from miles_router.engines.engine import Headers, Parse

HEADER = b"x-data-parallel-rank"
#: By this one an administrator chooses, where the engine's environment allows it.
OVERRIDE = b"x-override-routed-dp-rank"
#: The newest name first; both are read.
FIELDS = ("routed_dp_rank", "data_parallel_rank")
_QUOTED = tuple(b'"%b"' % name.encode() for name in FIELDS)
#: The paths where the header counts.
BY_HEADER = frozenset({paths.CHAT, paths.COMPLETIONS, paths.MESSAGES, paths.RESPONSES, paths.INVOCATIONS})
MAX_RANKS = 1024


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
