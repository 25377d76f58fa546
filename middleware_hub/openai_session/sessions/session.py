"""One session, with its turns, its contract, its status and the data kept for its agent; and the request of one turn of
it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import orjson

from middleware_hub.openai_session.episodes.contract import NO_CONTRACT, Contract, EpisodeState, SessionEnd
from middleware_hub.openai_session.sessions.equality import MEANING, Equality
from middleware_hub.openai_session.sessions.history import ParentMatch, SessionHistory
from middleware_hub.openai_session.sessions.replies import RecordedReply, RepeatKey
from middleware_hub.openai_session.sessions.rewards import SessionRewards
from middleware_hub.openai_session.sessions.turn import Turn
from miles_router.middlewares.rows import RowPrefix
from miles_router.trajectory import Piece
from miles_router.trajectory.pieces import Tokens
from miles_router.trajectory.rows import RowKind

#: The known reasons of branches. A history that cannot be continued in tokens has a reason in free text instead.
REASONS: Collection[str] = frozenset(
    {
        *("retry", "choice", "parallel", "edited_history", "compaction", "sub_agent", "changed_tools"),
        *("text_prompt", "batch"),
    }
)
#: The name that stands for every reason in free text.
FREE_TEXT = "other"
#: The most characters of a label.
MAX_LABEL = 200
#: The most characters of a group's name in lists; clients may name longer ones in the metadata.
MAX_GROUP = 256


def reason_name(reason: str | None) -> str | None:
    """Return a reason of `REASONS` unchanged, and `FREE_TEXT` for a reason in free text."""
    return reason if reason is None or reason in REASONS else FREE_TEXT


def shown_group(group: str | None) -> str | None:
    """Return the group's name, shortened for lists."""
    return None if group is None else group[:MAX_GROUP]


def label_of(metadata: Mapping[str, Any]) -> str | None:
    """Return the session's label from its metadata: `label`, else `instance_id`; None without either."""
    label = metadata.get("label", metadata.get("instance_id"))
    if label is None:
        return None
    text = label if isinstance(label, str) else orjson.dumps(label, default=dict).decode()
    return text[:MAX_LABEL]


class Tally:
    """Running sums over the turns of a session."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        self.tokens = 0  # given and sampled; tokens that several turns share count once
        self.sampled = 0
        self.leaves = 0
        self.waited = 0.0  # seconds
        self.versions: dict[str, None] = {}  # weight versions, in the order in which they appeared
        self.workers: dict[str, None] = {}
        #: The sampled tokens in the loss of the session's samples (None: not known), and the number of turns counted.
        self.trained: tuple[int | None, int] = (0, 0)
        self._seen = 0

    @classmethod
    def restored(cls, described: Mapping[str, Any], turns: int) -> Tally:
        """Return the sums over the first `turns` turns, from the output of `described`."""
        tally = cls()
        tally.reasons = Counter(described["reasons"])
        tally.tokens, tally.sampled, tally.leaves = described["tokens"], described["sampled"], described["leaves"]
        tally.waited = described["waited_s"]
        tally.versions, tally.workers = dict.fromkeys(described["versions"]), dict.fromkeys(described["workers"])
        tally._seen = turns
        return tally

    def updated(self, history: SessionHistory) -> Tally:
        """Add the turns that are new since the last call, and return self."""
        for turn in history.turns[self._seen :]:
            self._add(history, turn)
        self._seen = len(history.turns)
        return self

    def described(self) -> dict[str, Any]:
        """Return the sums as JSON, except `trained`, which depends on how samples are made."""
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
            now: Unix seconds.
            clock: seconds of a monotonic clock.
            equal: compares a message that the agent sends back with the recorded one.
            by_header: whether a turn with a session header created the session, not `POST /sessions`.
        """
        self.id = session_id
        self.by_header = by_header
        self.ending = SessionEnd()  # the status: which turns may still run, and the reason of the end
        self.episode = EpisodeState(contract, clock)
        self.created_at = now
        self.used_at = now
        self.idle_since = clock  # monotonic
        self.metadata = dict(metadata or {})
        self.history = SessionHistory(equal)
        self.turns: Sequence[Turn] = self.history.turns  # in the order in which they were recorded
        self.roots: Sequence[Turn] = self.history.roots  # the turns without a parent
        self.untraced: list[dict[str, Any]] = []  # requests that were forwarded without being recorded
        self.rewards = SessionRewards()  # of turns, segments and token spans
        self.in_flight = 0
        self.replies: dict[object, Any] = {}  # futures by `repeat_key`, including running turns (turns/reply.py)
        self.repeats: dict[RepeatKey, RecordedReply] = {}  # the complete replies among them
        self.notes: dict[str, Any] = {}  # data that agent APIs keep between turns, by dotted names
        self.finalized_with: Mapping[str, Any] | None = None  # label, reward, and how its samples are built
        self.nbytes = 0  # arrays and messages
        self.model: str | None = None  # the model name of the last request
        self.tally = Tally()
        self.read_turns: set[int] = set()  # numbers of the turns in the loss of a sample that a client has read
        self.rewarded = False  # whether the statistics count its reward

    def leaves(self) -> list[Turn]:
        """Return the turns without children, in the order in which they were recorded."""
        return self.history.leaves()

    @property
    def sort_key(self) -> tuple[float, str]:
        """The sort key of the session: creation time, then id."""
        return self.created_at, self.id

    @property
    def group(self) -> str | None:
        """The group of the session, from its contract or its metadata."""
        group = self.episode.group(self.metadata)
        return None if group is None else str(group)

    @property
    def is_evaluation(self) -> bool:
        """Whether the session is an evaluation, which is not for training."""
        return self.episode.contract.evaluation is not None

    @property
    def weight_versions(self) -> Collection[str]:
        """The weight versions that sampled recorded turns, in the order in which they appeared."""
        return self.tally.updated(self.history).versions

    def about(self) -> dict[str, Any]:
        """Return the contract, the end reason and whether it is an evaluation, without null values, for records and
        samples."""
        values = {
            "contract": self.episode.given or None,
            "end_reason": self.ending.reason,
            "evaluation": self.is_evaluation or None,
        }
        return {name: value for name, value in values.items() if value is not None}

    def settle(self, turn: object, tokens: int, repeat_key: object = None) -> None:
        """Count a turn that sampled this many tokens, and reopen the session if a full context had ended it.

        Args:
            turn: the key under which the ledger reserved tokens.
            repeat_key: equal for a request and its repetitions, which count as one turn.
        """
        self.episode.settle(turn, tokens, repeat_key)
        self.ending = self.ending.reopened()

    def clear(self) -> None:
        """Drop all turns, replies and notes at once."""
        self.history.clear()
        self.rewards = SessionRewards()
        self.replies.clear()
        self.repeats.clear()
        self.notes.clear()


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
