"""One session: its turns, its limits, how far it has come to its end, and what is kept for its agent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import orjson

from middleware_hub.openai_session.episodes.contract import NO_CONTRACT, Contract, SessionEnd
from middleware_hub.openai_session.episodes.episode import EpisodeState
from middleware_hub.openai_session.sessions.equality import MEANING, Equality
from middleware_hub.openai_session.sessions.history import SessionHistory
from middleware_hub.openai_session.sessions.replies import RecordedReply, RepeatKey
from middleware_hub.openai_session.sessions.turn import Turn

#: Why a turn is not simply the next one of its parent. Of a history that cannot be continued in tokens, words say it.
REASONS: Collection[str] = frozenset(
    {
        *("retry", "choice", "parallel", "edited_history", "compaction", "sub_agent", "changed_tools"),
        *("text_prompt", "batch"),
    }
)
#: In place of words.
IN_WORDS = "other"
#: Characters of a label.
LONGEST_LABEL = 200
#: Of a group's name in lists; metadata, which anybody wrote, may name a longer one.
LONGEST_GROUP = 256


def reason_name(reason: str | None) -> str | None:
    """A reason as one of few."""
    return reason if reason is None or reason in REASONS else IN_WORDS


def shown_group(group: str | None) -> str | None:
    """A group as lists name it."""
    return None if group is None else group[:LONGEST_GROUP]


def label_of(metadata: Mapping[str, Any]) -> str | None:
    """What people call a session, as its metadata says it."""
    label = metadata.get("label", metadata.get("instance_id"))
    if label is None:
        return None
    text = label if isinstance(label, str) else orjson.dumps(label, default=dict).decode()
    return text[:LONGEST_LABEL]


class Tally:
    """Sums over turns."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        self.tokens = 0  # given and sampled, shared ones once
        self.sampled = 0
        self.leaves = 0
        self.waited = 0.0  # seconds
        self.versions: dict[str, None] = {}  # in the order of coming
        self.workers: dict[str, None] = {}
        #: Sampled tokens in the loss of its samples, and of how many turns that is; None: nobody can tell.
        self.trained: tuple[int | None, int] = (0, 0)
        self._seen = 0

    @classmethod
    def restored(cls, described: Mapping[str, Any], turns: int) -> Tally:
        """Return the sums over so many turns that were written as `described`."""
        tally = cls()
        tally.reasons = Counter(described["reasons"])
        tally.tokens, tally.sampled, tally.leaves = described["tokens"], described["sampled"], described["leaves"]
        tally.waited = described["waited_s"]
        tally.versions, tally.workers = dict.fromkeys(described["versions"]), dict.fromkeys(described["workers"])
        tally._seen = turns
        return tally

    def upto(self, history: SessionHistory) -> Tally:
        """Return the sums over all turns of the session."""
        for turn in history.turns[self._seen :]:
            self._add(history, turn)
        self._seen = len(history.turns)
        return self

    def described(self) -> dict[str, Any]:
        """As JSON has it, but for what depends on how samples are made."""
        return {
            "reasons": dict(self.reasons),
            "tokens": self.tokens,
            "sampled": self.sampled,
            "leaves": self.leaves,
            "waited_s": round(self.waited, 6),
            "versions": [*self.versions],
            "workers": [*self.workers],
        }

    def _add(self, history: SessionHistory, turn: Turn) -> None:
        reason = history.classify(turn).reason
        if (name := reason_name(reason)) is not None:
            self.reasons[name] += 1
        sampled = sum(map(len, turn.sampled))
        self.sampled += sampled
        self.tokens += sampled + (0 if reason == "choice" else len(turn.given))
        self.leaves += turn.parent is None or history.children(turn.parent)[0] is not turn
        self.waited += turn.facts.get("waited_s", 0.0) if reason != "choice" else 0.0
        self.versions.update((piece.version, None) for piece in turn.sampled if piece.version is not None)
        if (worker := turn.facts.get("worker")) is not None:
            self.workers[worker] = None


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
