"""Per-token arrays of a sample from the rewards of its turns.

A reward stands at the last sampled token of its turn, or of the sample if it is a segment's; a value of another name on
each sampled token; a span's on each token of the span. Rewards at one token add up; of other values a turn's replaces
its segment's, a span's its turn's, and a later span an earlier one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from middleware_hub.openai_session.sessions.rewards import RewardEntry, check_name, is_number, is_reward
from middleware_hub.openai_session.sessions.turn import Turn
from miles_router.errors import BadRequest
from miles_router.trajectory.sample import TokenValues

#: The most arrays of a request.
MAX_ARRAYS = 16


def checked_arrays(given: object) -> tuple[str, ...]:
    """Return the names of the arrays that a request for samples wants.

    Raises:
        BadRequest: they are not a list of different names.
    """
    if not isinstance(given, list) or len(given) > MAX_ARRAYS:
        raise BadRequest(f"per_token must be a list of at most {MAX_ARRAYS} names, such as ['reward', 'advantage']")
    names = tuple(map(check_name, given))
    if len({*names}) < len(names):
        raise BadRequest("per_token has a name twice")
    return names


def per_token(
    names: Iterable[str], turns: Sequence[tuple[Turn, int]], length: int, rewards: Mapping[int, Sequence[RewardEntry]]
) -> dict[str, TokenValues]:
    """Return the arrays with these names, of `length` numbers, 0.0 where there is no value.

    Args:
        turns: the turns of the sample, each with the end of its sampled tokens in it.
        rewards: the entries of each turn.

    Raises:
        BadRequest: a value is no number.
    """
    with np.errstate(over="ignore"):  # `Sample` refuses an infinite sum by name
        return {name: _array(name, turns, length, rewards) for name in names}


def _array(
    name: str, turns: Sequence[tuple[Turn, int]], length: int, rewards: Mapping[int, Sequence[RewardEntry]]
) -> TokenValues:
    array = np.zeros(length, np.float64)
    spans = [(turn.prompt_tokens, end) for turn, end in turns]
    sampled = [(start, end) for start, end in spans if start < end]
    for (turn, _), own in zip(turns, spans, strict=True):
        found = [entry for entry in rewards.get(turn.number, ()) if entry["name"] == name]
        for entry in sorted(found, key=_width):
            if not is_number(entry["value"]):
                raise BadRequest(f"per_token {name!r}: the value of turn {turn.number} is not a number")
            for start, end in _ranges(entry, own, sampled):
                array[start:end] = entry["value"] + (array[start:end] if is_reward(name) else 0.0)
    return array


def _width(entry: RewardEntry) -> int:
    return 0 if "segment" in entry else 1 if "span" not in entry else 2


def _ranges(entry: RewardEntry, own: tuple[int, int], sampled: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the positions of an entry in a sample.

    Args:
        own: the range of its turn.
        sampled: the ranges of all turns that have tokens in the sample.
    """
    start, end = own
    if "span" in entry:
        first, behind = entry["span"]
        return [(start + first, min(start + behind, end))]
    ranges = [*sampled] if "segment" in entry else [own] if start < end else []
    return [(ranges[-1][1] - 1, ranges[-1][1])] if is_reward(entry["name"]) and ranges else ranges
