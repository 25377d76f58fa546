"""A turn that is under way: what its agent asks, where it will hang in the tree, and the ids that the engine is given.

A root goes as its agent wrote it, and the engine tells the ids that its template made of that. A turn that extends a
held one goes as ids: those that are held, and new ones behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from middleware_hub.openai_session.episodes.contract import SessionStatus
from middleware_hub.openai_session.sessions.history import ParentMatch
from middleware_hub.openai_session.sessions.session import Session
from middleware_hub.openai_session.sessions.turn import Turn
from miles_router.middlewares.rows import Handovers, RowPrefix
from miles_router.trajectory import Piece
from miles_router.trajectory.pieces import Tokens
from miles_router.trajectory.rows import RowKind


class TokenPrompt(NamedTuple):
    """The ids that a turn is given which extends another: those of the parent that stay, and new ones. `dropped`: how
    many at the parent's end do not stay."""

    parent: Turn
    given: Piece
    dropped: int = 0

    @property
    def held(self) -> int:
        """How many of the parent's stay."""
        return self.parent.tokens - self.dropped

    @property
    def length(self) -> int:
        """How many they are."""
        return self.held + len(self.given)

    def ids(self) -> Tokens:
        """All of them."""
        return np.concatenate([self.parent.trajectory().tokens[: self.held], self.given.tokens])


@dataclass
class PendingTurn:
    """One request in a session, and the turns that its answer will be.

    Attributes:
        path: where the agent asked.
        fields: the request as the engine's endpoint takes it.
        places: where the turns of each prompt will hang; several for a batch.
        asked_at: Unix seconds.
        prompt: None for a root.
        segment: why a history that is held in words is not continued in tokens.
        turn_id: the agent's name for it, or for the turn of which it is a step.
        side_call: whether its agent says that it is none of the main line.
        handovers: of the rows that are captured.
        cache: the prefix cache that it was sampled with, once that is known.
        recorded: whether its answer is held.
        written: the ids of its prompt as the engine was given them, in pieces; empty where it was given none.
        asked: the request as its agent wrote it or as its face has read it, for when it writes the answer.
        facts: what its face adds to those of the recorded turn.
        remember: told of each turn that the answer has become; gives the bytes that its face keeps of it.
        cut_by: which part of the contract has made it shorter than its agent wanted, as the end that it brings about.
        asked_for: what its agent wanted where the contract has something else.
        reservation: what the ledger of its episode knows it by.
        repeat_key: what it and its repetitions have in common; None for a turn without an id.
        left: whether its client has left before it had the answer.
        aborted: whether its answer was cut off at the engine.
        seen_tokens: tokens of its stream that have come.
    """

    session: Session
    path: str
    fields: Mapping[str, Any]
    places: Sequence[ParentMatch]
    asked_at: float
    prompt: TokenPrompt | None = None
    segment: str | None = None
    turn_id: str | None = None
    side_call: bool = False
    handovers: Handovers = field(default_factory=Handovers)
    cache: int | None = None
    recorded: bool = False
    written: Sequence[bytes] = ()
    asked: object = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    remember: Callable[[Turn], int] | None = None
    cut_by: SessionStatus | None = None
    asked_for: Mapping[str, Any] = field(default_factory=dict)
    reservation: object = None
    repeat_key: object = None
    left: bool = False
    aborted: bool = False
    seen_tokens: int = 0

    @property
    def stream(self) -> bool:
        """Whether the agent reads the answer as a stream."""
        return bool(self.fields.get("stream"))

    @property
    def answered(self) -> bool:
        """Whether its answer is held, and is one that a repetition is given: not one that its client's leaving cut."""
        return self.recorded and not (self.left and self.aborted)

    @property
    def several(self) -> bool:
        """Whether the answer has more than one choice."""
        return len(self.places) > 1 or self.fields.get("n") not in (None, 1)

    @property
    def choices(self) -> int:
        """How many choices the answer has. What is no number of choices is for the engine to refuse."""
        n = self.fields.get("n")
        return len(self.places) * (n if type(n) is int and n > 0 else 1)

    def held_rows(self, kind: RowKind) -> RowPrefix | None:
        """The rows held of the tokens that stay."""
        return self.prompt.parent.held_rows(kind, self.prompt.held) if self.prompt is not None else None
