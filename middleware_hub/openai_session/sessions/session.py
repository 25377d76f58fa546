"""One session: its turns, its limits, how far it has come to its end, and what is kept for its agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from middleware_hub.openai_session.episodes.contract import NO_CONTRACT, Contract, SessionEnd
from middleware_hub.openai_session.episodes.episode import EpisodeState
from middleware_hub.openai_session.sessions.equality import MEANING, Equality
from middleware_hub.openai_session.sessions.history import SessionHistory
from middleware_hub.openai_session.sessions.replies import RecordedReply, RepeatKey
from middleware_hub.openai_session.sessions.tally import Tally
from middleware_hub.openai_session.sessions.turn import Turn


class Session:
    """One agent episode."""

    def __init__(
        self,
        session_id: str,
        *,
        now: float,
        clock: float,
        metadata: Mapping[str, Any] | None = None,
        contract: Contract = NO_CONTRACT,
        by_header: bool = False,
        equal: Equality = MEANING,
    ) -> None:
        """
        Args:
            equal: whether a message that its agent sends back is one that is held.
            by_header: its first turn named it in a header; else `POST /sessions` made it.
        """
        self.id = session_id
        self.by_header = by_header
        self.ending = SessionEnd()  # what may still happen in it, and what ended its work
        self.episode = EpisodeState(contract, clock)
        self.created_at = now
        self.used_at = now
        self.idle_since = clock  # by a clock that never jumps
        self.metadata = dict(metadata or {})
        self.history = SessionHistory(equal)
        self.turns: Sequence[Turn] = self.history.turns  # in the order in which they were recorded
        self.roots: Sequence[Turn] = self.history.roots  # those of them that extend none
        self.untraced: list[dict[str, Any]] = []  # requests that passed through without being recorded
        self.in_flight = 0
        self.replies: dict[object, Any] = {}  # by `repeat_key`, those under way included (turns/reply.py)
        self.repeats: dict[RepeatKey, RecordedReply] = {}  # of these, the replies that are whole
        self.notes: dict[str, Any] = {}  # what faces remember of its turns, by dotted names
        self.finalized_with: Mapping[str, Any] | None = None  # label, reward, and how its samples are built
        self.nbytes = 0  # arrays and messages
        self.model: str | None = None  # that the last request named
        self.tally = Tally()
        self.read: set[int] = set()  # turns that a sample which somebody has read has in its loss
        self.rewarded = False  # its reward is counted

    def leaves(self) -> list[Turn]:
        """Return the turns that nothing extends, in the order in which they were recorded."""
        return self.history.leaves()

    @property
    def place_in_order(self) -> tuple[float, str]:
        """Where it stands among all."""
        return self.created_at, self.id

    @property
    def group(self) -> str | None:
        """Which group it is of."""
        group = self.episode.group(self.metadata)
        return None if group is None else str(group)

    def about(self) -> dict[str, Any]:
        """Return the contract and the end reason, for records and samples."""
        told = {"contract": self.episode.given or None, "end_reason": self.ending.reason}
        return {name: value for name, value in told.items() if value is not None}

    def settle(self, turn: object, tokens: int, repeat_key: object = None) -> None:
        """Count a turn that sampled so many tokens. If a full context had ended the session, it goes on."""
        self.episode.settle(turn, tokens, repeat_key)
        self.ending = self.ending.reopened()

    def clear(self) -> None:
        """Let go of all turns and replies at once."""
        self.history.clear()
        self.replies.clear()
        self.repeats.clear()
        self.notes.clear()
