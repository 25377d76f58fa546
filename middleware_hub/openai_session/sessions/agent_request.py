"""One request of an agent after its API has read it: its position in the session's tree, and the prompt ids.

The engine gets the messages of a root as the agent wrote them, and returns the ids that its chat template makes.
For a turn that extends a recorded turn the engine gets ids: the recorded ones, then new ones.
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
    """The prompt ids of a turn that extends `parent`: the parent's ids without the last `dropped`, then `given`."""

    parent: Turn
    given: Piece
    dropped: int = 0

    @property
    def kept(self) -> int:
        """The number of the parent's ids that the prompt keeps."""
        return self.parent.tokens - self.dropped

    @property
    def length(self) -> int:
        """The number of all ids."""
        return self.kept + len(self.given)

    def ids(self) -> Tokens:
        """Return all ids, copied into one array."""
        return np.concatenate([self.parent.trajectory().tokens[: self.kept], self.given.tokens])


@dataclass(frozen=True)
class AgentRequest:
    """One request of an agent, read by its API and placed in the session's tree.

    Attributes:
        path: the path of the agent's request.
        fields: the request in the form of the engine's endpoint.
        parents: the parent of the new turns, for each prompt; a batch has several prompts.
        asked_at: Unix seconds.
        prompt: None for a root.
        segment: the reason why a root does not continue the ids of its recorded history; None without such a history.
        asked: the agent API's own data for writing the answer.
        facts: entries that the agent API adds to the facts of the recorded turn.
        remember: called with each recorded turn; returns the number of bytes that the agent API keeps for it.
    """

    session: Session
    path: str
    fields: Mapping[str, Any]
    parents: Sequence[ParentMatch]
    asked_at: float
    prompt: PromptIds | None = None
    segment: str | None = None
    asked: object = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    remember: Callable[[Turn], int] | None = None

    @property
    def stream(self) -> bool:
        """True if the agent wants a stream."""
        return bool(self.fields.get("stream"))

    @property
    def has_several_choices(self) -> bool:
        """True if the answer has more than one choice."""
        return len(self.parents) > 1 or self.fields.get("n") not in (None, 1)

    @property
    def choices(self) -> int:
        """The number of choices in the answer. An invalid `n` counts as 1; the engine refuses it."""
        n = self.fields.get("n")
        return len(self.parents) * (n if type(n) is int and n > 0 else 1)

    def held_rows(self, kind: RowKind) -> RowPrefix | None:
        """Return the recorded rows of the prompt's first tokens; None for a root."""
        return self.prompt.parent.held_rows(kind, self.prompt.kept) if self.prompt is not None else None
