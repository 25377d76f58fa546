"""Which of a line's sampled tokens can be held against logprobs that are computed now, and why the others cannot. Pure.

other_weights           sampled by weights that are not loaded now
unknown_weights         nobody has named their weights
weights_changed_within  of a turn that several versions have sampled: the keys and values may be of each
old_cache               sampled with keys and values of other weights
reshaped_by_NAME        this setting has made their logprobs those of another distribution
unknown_adapter         nobody can tell which adapter has sampled them
context                 they stand behind what the engine takes as a prompt
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from middleware_hub.openai_session.sessions.tree import ADAPTER, RESHAPED_BY, SAMPLING, Turn, line_ends
from miles_router.engines.recomputing import TEMPERATURE, reshaped_by, temperature


class Span(NamedTuple):
    """Positions `[start, end)` of a line's tokens, which one turn has sampled under one weight version."""

    turn: Turn
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
    """Of what a turn's logprobs are: the weights' own where `reshaped_by` is None and the temperature 1."""

    reshaped_by: str | None
    temperature: float


def distribution(turn: Turn, assumed: Sequence[Mapping[str, Any]]) -> Distribution:
    """That of a turn, by what its request said and what its engine assumes."""
    said = turn.facts.get(SAMPLING, {})
    divided_by = temperature(said, *assumed)
    reshaped = turn.facts.get(RESHAPED_BY) or reshaped_by(said, *assumed)
    if divided_by is None:
        return Distribution(reshaped or TEMPERATURE, 1.0)
    return Distribution(reshaped, divided_by)


def comparable(
    line: Sequence[Turn],
    elsewhere: Mapping[Turn, int],
    now: str | None,
    longest: int,
    distributions: Mapping[Turn, Distribution],
) -> Comparable:
    """Sort what a line has sampled.

    Args:
        elsewhere: how many of a turn's first tokens another sample has.
        now: the weight version that is loaded.
        longest: tokens that the engine takes as a prompt.
        distributions: of each turn.
    """
    spans: list[Span] = []
    others: Counter[str] = Counter()
    for turn, end in zip(line, line_ends(line), strict=True):
        first, begin = turn.prompt_tokens + elsewhere.get(turn, 0), turn.prompt_tokens
        for piece in turn.sampled:
            start, stop = max(begin, first), min(begin + len(piece), end)
            begin += len(piece)
            if start >= stop:
                continue
            obstacle = _obstacle(turn, piece.version, now, distributions[turn])
            if obstacle is not None or piece.version is None:
                others[obstacle or "unknown_weights"] += stop - start
                continue
            within = max(start, min(stop, longest))
            others["context"] += stop - within
            if start < within:
                asked = (str(turn.facts.get(ADAPTER, "")), distributions[turn].temperature)
                spans.append(Span(turn, start, within, piece.version, *asked))
    return Comparable(tuple(spans), {reason: count for reason, count in others.items() if count})


def _obstacle(turn: Turn, version: str | None, now: str | None, told: Distribution) -> str | None:
    """Why tokens of this version in a turn cannot be compared."""
    if version is None or now is None:
        return "unknown_weights"
    if version != now:
        return "other_weights"
    if any(piece.version != version for piece in turn.sampled):
        return "weights_changed_within"
    if any(held != version for held in turn.facts.get("cache_versions") or ()):
        return "old_cache"
    if told.reshaped_by is not None:
        return f"reshaped_by_{told.reshaped_by}"
    return "unknown_adapter" if turn.facts.get(ADAPTER, "") is None else None
