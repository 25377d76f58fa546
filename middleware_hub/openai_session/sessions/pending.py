"""A turn that is under way: what its agent asks, where it will hang in the tree, and the ids that the engine is given.

A root goes as its agent wrote it, and the engine tells the ids that its template made of that. A turn that extends a
held one goes as ids: those that are held, and new ones behind them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from middleware_hub.openai_session.sessions.tree import Place, Session
from miles_router.middlewares import Handover, RowPrefix
from miles_router.trajectory import Piece
from miles_router.trajectory.pieces import Tokens


class TokenPrompt(NamedTuple):
    """The ids that a turn is given which extends another: those of the parent that stay, and new ones. `dropped`: how
    many at the parent's end do not stay."""

    held: Tokens
    given: Piece
    dropped: int = 0

    def ids(self) -> Tokens:
        """All of them."""
        return np.concatenate([self.held, self.given.tokens])


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
        turn_id: the agent's name for it.
        experts: where routed experts are captured.
        cache: the prefix cache that it was sampled with, once that is known.
    """

    session: Session
    path: str
    fields: Mapping[str, Any]
    places: Sequence[Place]
    asked_at: float
    prompt: TokenPrompt | None = None
    segment: str | None = None
    turn_id: str | None = None
    experts: Handover | None = None
    cache: int | None = None

    @property
    def stream(self) -> bool:
        """Whether the agent reads the answer as a stream."""
        return bool(self.fields.get("stream"))

    @property
    def several(self) -> bool:
        """Whether the answer has more than one choice."""
        return len(self.places) > 1 or self.fields.get("n") not in (None, 1)

    @property
    def held_experts(self) -> RowPrefix | None:
        """The routed experts held of the tokens that stay."""
        parent = self.places[0].parent
        if self.prompt is None or parent is None:
            return None
        return parent.held_experts(len(self.prompt.held))
