"""Records of a session for trainers: each turn with its request and answer, and the tree of turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from middleware_hub.openai_session.sessions.rewards import RewardEntry
from middleware_hub.openai_session.sessions.session import Session
from middleware_hub.openai_session.sessions.turn import ADAPTER, Classification, Turn
from miles_router.middlewares.rows import TrajectoryRows
from miles_router.trajectory import Trajectory
from miles_router.trajectory.json_parts import list_parts

#: A turn, its classification, which depends on the turns before it, and its rewards.
Classified = tuple[Turn, Classification, Sequence[RewardEntry]]


def classified(session: Session) -> list[Classified]:
    """Return the current turns with their classifications and rewards, for a thread to write."""
    rewards = map(session.rewards.of, range(len(session.turns)))
    return list(zip(session.turns, session.history.classified(), rewards, strict=True))


def compact_answer(session_id: str, turns: Sequence[Classified], metadata: Mapping[str, Any]) -> bytes:
    """Return the answer to `GET /sessions/{id}?form=compact`. Turns are immutable, so this may run in a thread."""
    records = ((orjson.dumps(record(*each), default=dict),) for each in turns)
    begin, end = b'{"session_id":%b,"records":' % orjson.dumps(session_id), b',"metadata":%b}' % orjson.dumps(metadata)
    return b"".join((begin, *list_parts(records), end))


def metadata_of(session: Session) -> dict[str, Any]:
    """Return the current facts about a session as a whole."""
    return {
        **session.metadata,
        **session.about(),
        "created_at": session.created_at,
        "last_used_at": session.used_at,
        "in_flight": session.in_flight,
        "turns": len(session.turns),
        "roots": [turn.number for turn in session.roots],
        "leaves": [turn.number for turn in session.leaves()],
        "segments": len(session.roots),
        "untraced": list(session.untraced),
        "bytes": session.nbytes,
    }


def summary(session: Session) -> dict[str, Any]:
    """Return the session's line in `GET /sessions`."""
    return {
        "session_id": session.id,
        "evaluation": session.is_evaluation,
        "turns": len(session.turns),
        "tokens": sum(len(turn.given) + sum(map(len, turn.sampled)) for turn in session.turns),
        "bytes": session.nbytes,
        "in_flight": session.in_flight,
        "created_at": session.created_at,
        "last_used_at": session.used_at,
    }


def record(turn: Turn, found: Classification, rewards: Sequence[RewardEntry] = ()) -> dict[str, Any]:
    """Return the record of one turn.

    `span` is the range of its sampled tokens in the trajectory of any leaf behind it. The next turn of a line may have
    dropped tokens at its end.

    `timestamp` to `status_code` are fields of a miles `SessionRecord` (Unix seconds). This form does not repeat the
    history: `messages_before` is the number of messages in front of `messages`. `full_records` writes the whole request
    and response.
    """
    return {
        "turn": turn.number,
        "parent": None if turn.parent is None else turn.parent.number,
        "reason": found.reason,
        "edit": found.edit,
        "path": turn.path,
        "messages": turn.appended,
        "response": turn.answer,
        "unrecorded_history": found.unrecorded,
        "finish_reason": turn.finish_reason,
        "choice": turn.choice,
        "span": [turn.prompt_tokens, turn.tokens],
        "given_tokens": len(turn.given),
        "dropped_tokens": turn.dropped,
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.tokens - turn.prompt_tokens,
        "weight_versions": _weight_versions(turn),
        "rewards": rewards,
        **turn.facts,
        **{kind.name: _rows(taken) for kind, taken in turn.rows.items()},
        "timestamp": turn.facts.get("answered_at"),
        "request_timestamp": turn.facts.get("asked_at"),
        "method": "POST",
        "status_code": 200,
        "request": {"messages_before": turn.messages - len(turn.appended) - 1},
    }


def _rows(taken: TrajectoryRows) -> dict[str, Any]:
    """Return the number of routed-expert (or similar) rows of a turn, including the rows that it shares with its
    parent. If the turn has no rows, return 0 and the reason."""
    rows, reason = taken
    if rows is None:
        return {"rows": 0, "reason": reason}
    return {"rows": len(rows)} if rows.complete() else {"rows": 0, "reason": "evicted"}


def _weight_versions(turn: Turn) -> list[dict[str, Any]]:
    """Return the weight versions of a turn's sampled tokens, by positions in the trajectory of any leaf behind it."""
    shift = turn.prompt_tokens
    return [
        {"version": run.version, "start": run.start + shift, "end": run.end + shift}
        for run in Trajectory(turn.sampled).weight_versions
    ]


def turn_span(turn: Turn, found: Classification, end: int, rewards: Sequence[RewardEntry]) -> Mapping[str, Any]:
    """Return the range of a turn's sampled tokens within a sample, with facts about the turn. `end` is the position
    behind its last token that the next turn did not drop."""
    facts = ("cached_tokens", "cache_versions", "asked_at", "first_token_at", "answered_at", "worker", "rid", "turn_id")
    return {
        "turn": turn.number,
        "start": turn.prompt_tokens,
        "end": end,
        "finish_reason": turn.finish_reason,
        "reason": found.reason,
        "edit": found.edit,
        "rewards": rewards,
        **{name: turn.facts.get(name) for name in (*facts, "versions", "parsed")},
        **({ADAPTER: turn.facts[ADAPTER]} if ADAPTER in turn.facts else {}),
    }
