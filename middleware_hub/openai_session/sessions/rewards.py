"""Rewards, advantages and other labels of turns, segments and token spans, as an environment or a trainer sets them.

An entry is JSON: `turn` or `segment` (the number of its first turn), `span` (positions among the turn's sampled tokens,
the end excluded) if it is about some of them, `name` and `value`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from middleware_hub.openai_session.sessions.turn import Turn
from miles_router.errors import BadRequest, NotFound

RewardEntry = Mapping[str, Any]
REWARD, ADVANTAGE = "reward", "advantage"
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
FIELDS = frozenset({"turn", "segment", "span", "name", "value", REWARD})
#: The most entries of a request, and of a session, replaced ones included.
MAX_AT_ONCE, MAX_ENTRIES = 4096, 1 << 16
#: The most bytes of a value as JSON, and the memory of an entry beside its JSON.
MAX_VALUE_BYTES, ENTRY_BYTES = 1 << 16, 512


def is_reward(name: str) -> bool:
    """Return whether a name is a reward's. A turn has a reward once, and values of other names on each token."""
    return name == REWARD or name.endswith(f"_{REWARD}")


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_name(name: object) -> str:
    """Return `name` if it is valid as the name of a reward.

    Raises:
        BadRequest: it is not a valid name.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise BadRequest("name must be 1 to 64 of the characters A-Z a-z 0-9 _ . -")
    return name


class SessionRewards:
    """The reward entries of one session."""

    def __init__(self) -> None:
        #: Every entry in the order of arrival, including replaced entries; the archive appends to it.
        self.log: list[RewardEntry] = []
        self._by_turn: dict[int, dict[object, RewardEntry]] = {}

    def set(self, entries: Sequence[RewardEntry]) -> None:
        """Add entries; each replaces an earlier one of the same name and place."""
        for entry in entries:
            segment, span = entry.get("segment"), entry.get("span")
            held = self._by_turn.setdefault(entry["turn"] if segment is None else segment, {})
            key = segment is None, span and tuple(span), entry["name"]
            held.pop(key, None)  # so that the order is that in which the present values were set
            held[key] = entry
        self.log += entries

    def of(self, turn: int) -> list[RewardEntry]:
        """Return the entries of a turn, and of the segment that it begins, in the order in which they were set."""
        return [*self._by_turn.get(turn, {}).values()]

    def by_turn(self) -> dict[int, list[RewardEntry]]:
        """Return the entries of each turn that has some, as in `of`."""
        return {turn: self.of(turn) for turn in self._by_turn}

    def __len__(self) -> int:
        return sum(map(len, self._by_turn.values()))


def read_rewards(body: object, turns: Sequence[Turn]) -> list[RewardEntry]:
    """Return the entries in a request's body: an object, or a list of them.

    Raises:
        BadRequest: an entry is invalid; the message names it.
        NotFound: there is no such turn or segment.
    """
    given = body if isinstance(body, list) else [body]
    if len(given) > MAX_AT_ONCE:
        raise BadRequest(f"one request may set {MAX_AT_ONCE} rewards, not {len(given)}")
    entries = []
    for place, each in enumerate(given):
        try:
            entries.append(_entry(each, turns))
        except (BadRequest, NotFound) as error:
            if not isinstance(body, list):
                raise
            raise type(error)(f"[{place}]: {error}; nothing of the list was set") from None
    return entries


def entry_bytes(entries: Sequence[RewardEntry]) -> int:
    """Return the memory of entries, about."""
    return sum(ENTRY_BYTES + len(orjson.dumps(entry)) for entry in entries)


def _entry(given: object, turns: Sequence[Turn]) -> RewardEntry:
    if not isinstance(given, Mapping):
        raise BadRequest("a reward must be an object, such as {'turn': 0, 'reward': 0.5}")
    if unknown := given.keys() - FIELDS:
        raise BadRequest(f"unknown field {min(unknown)!r}; known are {', '.join(sorted(FIELDS))}")
    if ("turn" in given) == ("segment" in given):
        raise BadRequest("name one of turn and segment")
    kind = "turn" if "turn" in given else "segment"
    turn = _turn(kind, given[kind], turns)
    span = {} if given.get("span") is None else {"span": _span(kind, given["span"], turn)}
    return {kind: turn.number, **span, **_value(given)}


def _turn(kind: str, number: object, turns: Sequence[Turn]) -> Turn:
    if type(number) is not int:
        raise BadRequest(f"{kind} must be the number of a turn")
    if not 0 <= number < len(turns):
        raise NotFound(f"there is no turn {number}; the session has {len(turns)} turns")
    if kind == "segment" and turns[number].parent is not None:
        raise NotFound(f"turn {number} begins no segment; metadata.roots lists the first turn of each")
    return turns[number]


def _span(kind: str, span: object, turn: Turn) -> list[int]:
    if kind == "segment":
        raise BadRequest("a span is one of a turn; name the turn instead of the segment")
    if not isinstance(span, list) or len(span) != 2 or any(type(each) is not int for each in span):
        raise BadRequest("span must be [start, end], positions among the turn's sampled tokens")
    sampled = turn.tokens - turn.prompt_tokens
    if not 0 <= span[0] < span[1] <= sampled:
        counted = f"turn {turn.number} sampled {sampled} tokens, counted from 0"
        raise BadRequest(f"span {span} must be a range of its tokens, the end excluded: {counted}")
    return [*span]


def _value(given: Mapping[str, Any]) -> dict[str, Any]:
    if (REWARD in given) == ("name" in given) or ("name" in given) != ("value" in given):
        raise BadRequest("give either reward, or name and value")
    name = check_name(given.get("name", REWARD))
    value = given["value"] if "value" in given else given[REWARD]
    if is_number(value):
        return {"name": name, "value": value}
    if is_reward(name) or name == ADVANTAGE:
        raise BadRequest(f"{name} must be a number")
    if (nbytes := len(orjson.dumps(value))) > MAX_VALUE_BYTES:
        raise BadRequest(f"a value may have {MAX_VALUE_BYTES} bytes of JSON, not {nbytes}")
    return {"name": name, "value": value}
