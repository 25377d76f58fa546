"""Print a stored session as lines of JSON, without a router: its metadata, its records, and the tokens of each leaf."""

from __future__ import annotations

from collections.abc import Iterator

import orjson

from middleware_hub.openai_session.archive.steps import read_session
from middleware_hub.openai_session.export.records import classified, metadata_of, record
from middleware_hub.openai_session.sessions.session import Session
from middleware_hub.openai_session.sessions.turn import Turn
from miles_router.middlewares.state import Blobs


def lines_of(session_id: str, blobs: Blobs) -> Iterator[bytes]:
    """Yield JSON objects with one key each: `session`, `record` or `leaf`. Needs a running event loop.

    Raises:
        KeyError, IndexError, TypeError, ValueError: the blobs are not a session's.
    """
    session, _ = read_session(session_id, blobs, {}, {}, now=0.0, clock=0.0)
    yield _line("session", {"session_id": session.id, **metadata_of(session), "finalized": session.finalized_with})
    for each in classified(session):
        yield _line("record", record(*each))
    for leaf in session.leaves():
        yield _line("leaf", _tokens(session, leaf))


def _line(name: str, value: object) -> bytes:
    return orjson.dumps({name: value}, default=dict, option=orjson.OPT_SERIALIZE_NUMPY)


def _tokens(session: Session, leaf: Turn) -> dict[str, object]:
    trajectory = leaf.trajectory()
    return {
        "session_id": session.id,
        "turn": leaf.number,
        "tokens": trajectory.tokens,
        "loss_mask": trajectory.loss_mask,
        "logprobs": trajectory.logprobs,
        "weight_versions": [run._asdict() for run in trajectory.weight_versions],
    }
