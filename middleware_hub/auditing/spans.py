"""Decides which sampled tokens of a line can be compared with logprobs computed now, and why the others cannot. Pure.

other_weights           sampled by weights that are not loaded now
unknown_weights         the weight version is not known
unknown_settings        the sampling settings are not known: their generation is no longer stored, or an older version
                        of the router recorded it
weights_changed_within  several versions sampled the turn, so its keys and values may be of any of them
old_cache               sampled with keys and values that other weights computed
reshaped_by_NAME        this setting changed the distribution from which the logprobs were computed
unknown_adapter         the LoRA adapter that sampled them is not known
context                 beyond the longest prompt that the engine accepts
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
    """The sampled tokens of one generation of a line.

    Attributes:
        number: the turn's number in its episode.
        start, end: its positions in the tokens of the line, without the tokens that the next turn dropped.
        pieces: the sampled tokens from `start` on; they may reach beyond `end`.
        worker: the URL of the worker that sampled them.
        cache_versions: the weight versions that may have filled the prefix cache which the engine used.
        asked: the sampling settings of the request; None if they are not known.
        chat: whether it was a chat request.
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
    """The tokens up to the end of one generation, numbered `leaf`, and the turns that sampled them."""

    leaf: int
    trajectory: Trajectory
    turns: Sequence[AuditedTurn]


class Span(NamedTuple):
    """Positions `[start, end)` of a line's tokens that one turn sampled under one weight version."""

    turn: AuditedTurn
    start: int
    end: int
    version: str
    adapter: str
    temperature: float


class Comparable(NamedTuple):
    """The spans that can be compared, and the number of other sampled tokens, by reason."""

    spans: tuple[Span, ...]
    excluded: Mapping[str, int]


class Distribution(NamedTuple):
    """The distribution from which a turn's logprobs were computed.

    Attributes:
        obstacle: why it differs from the weights' own distribution; None if it does not, or only by the temperature.
        temperature: the divisor of the logits.
    """

    obstacle: str | None
    temperature: float


def distribution(asked: AskedSampling | None, assumed: Sequence[Mapping[str, Any]]) -> Distribution:
    """Return the distribution of a turn, from its request's settings and the defaults that its engine may assume."""
    if asked is None:
        return Distribution("unknown_settings", 1.0)
    divided_by = temperature(asked.requested, *assumed)
    reshaped = asked.reshaped_by or reshaped_by(asked.requested, *assumed)
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
    """Sort the sampled tokens of a line into comparable spans and others.

    Args:
        elsewhere: by turn number, how many of a turn's first tokens an earlier sample contains; they are skipped.
        now: the weight version that is loaded.
        longest: the longest prompt in tokens that the engine accepts.
        distributions: the distribution of each turn.
    """
    spans: list[Span] = []
    excluded: Counter[str] = Counter()
    for turn in turns:
        first, begin, measured = turn.start + elsewhere.get(turn.number, 0), turn.start, distributions[turn]
        for piece in turn.pieces:
            start, stop = max(begin, first), min(begin + len(piece), turn.end)
            begin += len(piece)
            if start >= stop or piece.logprobs is None:
                continue
            obstacle = _obstacle(turn, piece.version, now, measured)
            if obstacle is not None or piece.version is None:
                excluded[obstacle or "unknown_weights"] += stop - start
                continue
            within = max(start, min(stop, longest))
            excluded["context"] += stop - within
            if start < within:
                adapter = "" if turn.asked is None else turn.asked.adapter or ""
                spans.append(Span(turn, start, within, piece.version, adapter, measured.temperature))
    return Comparable(tuple(spans), {reason: count for reason, count in excluded.items() if count})


def _obstacle(turn: AuditedTurn, version: str | None, now: str | None, measured: Distribution) -> str | None:
    if version is None or now is None:
        return "unknown_weights"
    if version != now:
        return "other_weights"
    if any(piece.version != version for piece in turn.pieces if piece.logprobs is not None):
        return "weights_changed_within"
    if any(held != version for held in turn.cache_versions):
        return "old_cache"
    return measured.obstacle
