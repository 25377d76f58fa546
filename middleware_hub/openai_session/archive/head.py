"""The head of a stored session: everything about the session as a whole. Each commit rewrites the head, so lists read
only heads and no turns."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import orjson

from middleware_hub.openai_session.episodes.contract import NO_CONTRACT, restored_end
from middleware_hub.openai_session.episodes.reading import read_contract
from middleware_hub.openai_session.sessions.equality import Equality
from middleware_hub.openai_session.sessions.session import Session, label_of, shown_group
from middleware_hub.openai_session.sessions.store import ID
from miles_router.middlewares.episodes import ENDED, IDLE
from miles_router.middlewares.state import StateStore

KIND = "session"


async def heads_in(store: StateStore, slot: int) -> AsyncIterator[tuple[str, bytes]]:
    """Yield the name and the head of each stored session of a slot. Other owners in the store have names that no
    session may have."""
    async for owner, head in store.owners(slot):
        if ID.fullmatch(owner):
            yield owner, head


def written_head(session: Session, tokens: int, used_at: float) -> bytes:
    """Return the head of a session as JSON. `tokens` is the number of tokens of its turns."""
    episode = session.episode
    head = {
        "kind": KIND,
        "created_at": session.created_at,
        "used_at": used_at,
        "metadata": session.metadata,
        "contract": episode.contract.given,
        "key": episode.key,
        "group": session.group,
        "end_reason": session.ending.reason,
        "closed": session.ending.stopped_by,
        "used": episode.ledger.used,
        "finalized": session.finalized_with,
        "made_by_a_turn": session.by_header,
        "turns": len(session.turns),
        "tokens": tokens,
        "bytes": session.nbytes,
        "model": session.model,
        "tally": session.tally.updated(session.history).described(),
        "segments": len(session.roots),
        "finish_reason": session.turns[-1].finish_reason if session.turns else None,
    }
    return orjson.dumps(head, default=dict)


def session_of(session_id: str, head: dict[str, Any], *, now: float, clock: float, equal: Equality) -> Session:
    """Return the session that a head describes, without turns. Its idle time begins now.

    Raises:
        KeyError, TypeError, ValueError: the JSON is not a head.
    """
    session = Session(
        session_id,
        now=head["created_at"],
        clock=clock - (now - head["created_at"]),
        metadata=head["metadata"],
        contract=read_contract(head["contract"]) if head["contract"] else NO_CONTRACT,
        by_header=head["made_by_a_turn"],
        equal=equal,
    )
    session.used_at, session.idle_since, session.model = head["used_at"], clock, head["model"]
    session.finalized_with, session.nbytes = head["finalized"], head["bytes"]
    session.ending = restored_end(head["end_reason"], head["closed"], finalized=head["finalized"] is not None)
    episode = session.episode
    episode.key = head["key"]
    episode.ledger.tokens, episode.ledger.turns = head["used"]["tokens"], head["used"]["turns"]
    return session


def summary_of(session_id: str, head: bytes) -> dict[str, Any]:
    """Return the line in `GET /sessions` of a session that is not in memory."""
    known = orjson.loads(head)
    return {
        "session_id": session_id,
        "evaluation": (known["contract"] or {}).get("evaluation") not in (None, False),
        **{name: known[name] for name in ("turns", "tokens", "bytes")},
        "in_flight": 0,
        "created_at": known["created_at"],
        "last_used_at": known["used_at"],
    }


def line_of(session_id: str, head: bytes) -> dict[str, Any]:
    """Return the fields of a session in a list of episodes, as in `EpisodeRow`.

    Raises:
        KeyError, ValueError: the JSON is not a head.
    """
    known = orjson.loads(head)
    tally, model = known["tally"], (known["contract"] or {}).get("model") or {}
    return {
        "id": session_id,
        "state": IDLE if known["end_reason"] is None else ENDED,
        "group": shown_group(known["group"]),
        "label": label_of(known["metadata"]),
        "model": model.get("name") or model.get("lora") or known["model"],
        "turns": known["turns"],
        "under_way": 0,
        "segments": known["segments"],
        "leaves": tally["leaves"],
        "reasons": tally["reasons"],
        "tokens": {"all": tally["tokens"], "sampled": tally["sampled"], "trained": None},
        "finish_reason": known["finish_reason"],
        "end_reason": known["end_reason"],
        "weight_versions": tally["versions"],
        "workers": tally["workers"],
        "started_at": known["created_at"],
        "last_used_at": known["used_at"],
        "waited_s": tally["waited_s"],
    }
