"""An agent's request, read and placed in its session, and the ids that the engine is given for it.

A root goes as its agent wrote it, and the engine tells the ids that its template made of that. A turn that extends a
recorded one goes as ids: those that are recorded, and new ones behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from middleware_hub.openai_session.sessions.history import ParentMatch
from middleware_hub.openai_session.sessions.session import Session
from middleware_hub.openai_session.sessions.turn import Turn
from miles_router.middlewares.rows import RowPrefix
from miles_router.trajectory import Piece
from miles_router.trajectory.pieces import Tokens
from miles_router.trajectory.rows import RowKind


class PromptIds(NamedTuple):
    """The ids of a turn that extends `parent`: the parent's without its last `dropped`, then `given`."""

    parent: Turn
    given: Piece
    dropped: int = 0

    @property
    def held(self) -> int:
        """Return how many of the parent's ids stay."""
        return self.parent.tokens - self.dropped

    @property
    def length(self) -> int:
        """Return the number of all ids."""
        return self.held + len(self.given)

    def ids(self) -> Tokens:
        """Return all ids, copied into one array."""
        return np.concatenate([self.parent.trajectory().tokens[: self.held], self.given.tokens])


@dataclass(frozen=True)
class AgentRequest:
    """One request of an agent, as its API has read it and placed it in the session.

    Attributes:
        path: where the agent asked.
        fields: the request as the engine's endpoint takes it.
        places: where the turns of each prompt will hang; several for a batch.
        asked_at: Unix seconds.
        prompt: None for a root.
        segment: why a history that is recorded as text is not continued in tokens.
        asked: what the API needs to write the answer.
        facts: what the API adds to the facts of the recorded turn.
        remember: called with each recorded turn; returns the bytes that the API keeps of it.
    """

    session: Session
    path: str
    fields: Mapping[str, Any]
    places: Sequence[ParentMatch]
    asked_at: float
    prompt: PromptIds | None = None
    segment: str | None = None
    asked: object = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    remember: Callable[[Turn], int] | None = None

    @property
    def stream(self) -> bool:
        """Return whether the agent reads the answer as a stream."""
        return bool(self.fields.get("stream"))

    @property
    def several(self) -> bool:
        """Return whether the answer has more than one choice."""
        return len(self.places) > 1 or self.fields.get("n") not in (None, 1)

    @property
    def choices(self) -> int:
        """Return the number of choices of the answer; an invalid `n` counts as 1, and the engine refuses it."""
        n = self.fields.get("n")
        return len(self.places) * (n if type(n) is int and n > 0 else 1)

    def held_rows(self, kind: RowKind) -> RowPrefix | None:
        """Return the rows that are recorded of the prompt's first tokens."""
        return self.prompt.parent.held_rows(kind, self.prompt.held) if self.prompt is not None else None
