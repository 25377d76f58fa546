"""Sessions that are audited, and what may be wrong with what they hold."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, NamedTuple

import numpy as np

from middleware_hub.openai_session.sessions.tree import Turn
from miles_router.audit.command import run
from miles_router.trajectory import Piece
from tests.support.session_trial import Message, SessionTrial, message_of, user

SYSTEM: Message = {"role": "system", "content": "Be brief."}
#: Of a short answer with many tokens, whatever is sampled.
LONG: Any = {"max_tokens": 48, "ignore_eos": True}


class Said(NamedTuple):
    """What the command said, and how it ended."""

    status: int
    report: Any

    @property
    def parts(self) -> set[str]:
        """Kinds of what lies too far apart."""
        return {part.partition(" ")[0] for part in self.report["too_far"]}


async def audited(trial: SessionTrial, *flags: str) -> Said:
    """The command over a router's sessions."""
    said = io.StringIO()

    def command() -> int:
        with redirect_stdout(said):
            return run(["--router", trial.router.url, "--json", "--rate", "1000", *flags])

    status = await asyncio.to_thread(command)
    return Said(status, json.loads(said.getvalue()))


async def episode(trial: SessionTrial, session: str, turns: int = 3, **fields: Any) -> list[Message]:
    """An agent's turns, one behind the other; the history that they leave."""
    history = [SYSTEM, user("Hi")]
    for turn in range(turns):
        answer = await trial.chat(session, history, **{**LONG, **fields})
        history += [message_of(answer), user(f"Go on {turn}")]
    return history


def turns_of(trial: SessionTrial, session: str) -> list[Turn]:
    """The turns that the router holds."""
    middleware: Any = next(layer for layer in trial.router.app.layers if hasattr(layer, "store"))
    turns: list[Turn] = middleware.store.get(session).turns
    return turns


@contextmanager
def damaged(trial: SessionTrial, session: str, change: Callable[[Piece], Piece]) -> Iterator[None]:
    """Every turn of a session with other tokens or logprobs than it was sampled with, behind the router's back."""
    turns = turns_of(trial, session)
    before = [turn.sampled for turn in turns]
    for turn in turns:
        turn.sampled = tuple(map(change, turn.sampled))
    try:
        yield
    finally:
        for turn, sampled in zip(turns, before, strict=True):
            turn.sampled = sampled


def shifted(piece: Piece) -> Piece:
    """Each token with the logprob of the next one."""
    assert piece.logprobs is not None
    return Piece.sampled(piece.tokens, np.roll(piece.logprobs, -1), piece.version)


def foreign(piece: Piece) -> Piece:
    """Other tokens with the same logprobs."""
    assert piece.logprobs is not None
    ids = np.random.default_rng(7).integers(1000, 100_000, len(piece))
    return Piece.sampled(ids, piece.logprobs, piece.version)
