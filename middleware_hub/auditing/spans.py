"""Which of a line's sampled tokens can be held against logprobs that are computed now, and why the others cannot. Pure.

other_weights           sampled by weights that are not loaded now
unknown_weights         nobody has named their weights
unknown_settings        nobody can tell how they were asked for: their generation is held no more, or an older version
                        has recorded it
weights_changed_within  of a turn that several versions have sampled: the keys and values may be of each
old_cache               sampled with keys and values of other weights
reshaped_by_NAME        this setting has made their logprobs those of another distribution
unknown_adapter         nobody can tell which adapter has sampled them
context                 they stand behind what the engine takes as a prompt
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from miles_router.engines.recomputing import TEMPERATURE, AskedSampling, reshaped_by, temperature
from miles_router.trajectory import Piece, Trajectory


@dataclass(frozen=True, eq=False)
class AuditedTurn:
    """What one generation of a line has sampled.

    Attributes:
        number: its own in its episode.
        start, end: its positions in the tokens of the line; what the next one dropped is behind them.
        pieces: of these positions and what is behind them.
        worker: that sampled it.
        cache_versions: of the weights that may have filled what it found in a prefix cache.
        asked: None where nobody can tell.
        chat: whether by a request of chat.
    """

    number: int
    start: int
    end: int
    pieces: Sequence[Piece]
    worker: str | None
    cache_versions: Sequence[str | None]
    asked: AskedSampling | None
    chat: bool


class AuditedLine(NamedTuple):
    """The tokens up to the end of a generation, which is called `leaf`, and those that have sampled them."""

    leaf: int
    trajectory: Trajectory
    turns: Sequence[AuditedTurn]


class Span(NamedTuple):
    """Positions `[start, end)` of a line's tokens, which one turn has sampled under one weight version."""

    turn: AuditedTurn
    start: int
    end: int
    version: str
    adapter: str
    temperature: float


class Comparable(NamedTuple):
    """What can be compared, and how many of the other sampled tokens cannot be, by reason."""

    spans: tuple[Span, ...]
    others: Mapping[str, int]


class Distribution(NamedTuple):
    """Of what a turn's logprobs are: the weights' own where `obstacle` is None and the temperature 1."""

    obstacle: str | None
    temperature: float


def distribution(asked: AskedSampling | None, assumed: Sequence[Mapping[str, Any]]) -> Distribution:
    """That of a turn, by what its request said and what its engine assumes."""
    if asked is None:
        return Distribution("unknown_settings", 1.0)
    divided_by = temperature(asked.said, *assumed)
    reshaped = asked.reshaped_by or reshaped_by(asked.said, *assumed)
    if reshaped is None and divided_by is None:
        reshaped = TEMPERATURE
    if reshaped is not None:
        return Distribution(f"reshaped_by_{reshaped}", 1.0)
    return Distribution("unknown_adapter" if asked.adapter is None else None, divided_by or 1.0)


def comparable(
    turns: Sequence[AuditedTurn],
    elsewhere: Mapping[int, int],
    now: str | None,
    longest: int,
    distributions: Mapping[AuditedTurn, Distribution],
) -> Comparable:
    """Sort what a line has sampled.

    Args:
        elsewhere: how many of a turn's first tokens another sample has, by its number.
        now: the weight version that is loaded.
        longest: tokens that the engine takes as a prompt.
        distributions: of each turn.
    """
    spans: list[Span] = []
    others: Counter[str] = Counter()
    for turn in turns:
        first, begin, told = turn.start + elsewhere.get(turn.number, 0), turn.start, distributions[turn]
        for piece in turn.pieces:
            start, stop = max(begin, first), min(begin + len(piece), turn.end)
            begin += len(piece)
            if start >= stop or piece.logprobs is None:
                continue
            obstacle = _obstacle(turn, piece.version, now, told)
            if obstacle is not None or piece.version is None:
                others[obstacle or "unknown_weights"] += stop - start
                continue
            within = max(start, min(stop, longest))
            others["context"] += stop - within
            if start < within:
                adapter = "" if turn.asked is None else turn.asked.adapter or ""
                spans.append(Span(turn, start, within, piece.version, adapter, told.temperature))
    return Comparable(tuple(spans), {reason: count for reason, count in others.items() if count})


def _obstacle(turn: AuditedTurn, version: str | None, now: str | None, told: Distribution) -> str | None:
    """Why tokens of this version in a turn cannot be compared."""
    if version is None or now is None:
        return "unknown_weights"
    if version != now:
        return "other_weights"
    if any(piece.version != version for piece in turn.pieces if piece.logprobs is not None):
        return "weights_changed_within"
    if any(held != version for held in turn.cache_versions):
        return "old_cache"
    return told.obstacle
