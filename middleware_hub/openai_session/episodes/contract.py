"""The contract of an episode, set when its session is made: what its agent may use up, what it cannot change, how old
the weights may be, and when its work ends; and how a session ends, under a contract or without one. Pure.

    budget     max_tokens, max_context, max_turns, deadline_s
    sampling   settings that count in place of the agent's
    model      name, lora
    freshness  oldest_version, otherwise
    media      refuse, or replace: images and the like
    key        a key of the session's own
    group      what it is aborted with
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

#: Of settings that are fixed, others that would change the same.
ALSO = {"stop": ("stop_token_ids", "stop_regex")}
REFUSE, MARK, REPLACE = "refuse", "mark", "replace"
Group = str | int


@dataclass(frozen=True)
class Budget:
    """What an episode may use up; None: as much as it likes.

    Attributes:
        max_tokens: sampled in all turns together.
        max_context: prompt and answer of each turn together.
        max_turns: requests that are answered.
        deadline_s: seconds from the making of the session.
    """

    max_tokens: int | None = None
    max_context: int | None = None
    max_turns: int | None = None
    deadline_s: float | None = None

    @property
    def counts(self) -> bool:
        """Whether what turns have used up matters."""
        return self.max_tokens is not None or self.max_turns is not None

    @property
    def measures(self) -> bool:
        """Whether the length of prompts matters."""
        return self.max_tokens is not None or self.max_context is not None


@dataclass(frozen=True)
class Model:
    """Who answers: the name that the agent is shown, and the adapter by the engine's name for it."""

    name: str | None = None
    lora: str | None = None


@dataclass(frozen=True)
class Freshness:
    """The oldest weight version that may take part, a number, and whether a turn beyond it is refused or its samples
    are marked."""

    oldest_version: int | None = None
    otherwise: str = REFUSE

    def is_stale(self, version: str | None) -> bool:
        """Whether weights of this version are too old; of a version that is no number nobody can tell."""
        if self.oldest_version is None:
            return False
        return version is None or not version.isdecimal() or int(version) < self.oldest_version


@dataclass(frozen=True)
class Contract:
    """One contract; `given` is what was asked for, as it is shown."""

    budget: Budget = field(default_factory=Budget)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    model: Model = field(default_factory=Model)
    freshness: Freshness = field(default_factory=Freshness)
    media: str | None = None
    key: bool = False
    group: Group | None = None
    given: Mapping[str, Any] = field(default_factory=dict)

    def fixed(self, request: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """A request with what its agent cannot change, and what it asked for instead of that."""
        fixed: dict[str, Any] = dict(self.sampling)
        if self.model.lora is not None:
            fixed["lora_path"] = self.model.lora
        if self.model.name is not None:
            fixed["model"] = self.model.name
        elif self.model.lora is not None:
            fixed |= base_model(request)
        if not fixed:
            return request, {}
        instead = [other for name in fixed for other in ALSO.get(name, ())]
        asked = {
            name: request[name]
            for name in (*fixed, *instead)
            if request.get(name) is not None and request[name] != fixed.get(name)
        }
        kept = {name: value for name, value in request.items() if name not in instead}
        return {**kept, **fixed}, asked


def base_model(request: Mapping[str, Any]) -> dict[str, str]:
    """The model that a request names, without an adapter: SGLang reads one behind a colon, and it would count more than
    `lora_path`."""
    model = request.get("model")
    return {"model": model.partition(":")[0]} if isinstance(model, str) and ":" in model else {}


NO_CONTRACT = Contract()


class SessionStatus(Enum):
    """What may still happen in a session. But for OPEN, each is an end that a cause has brought about."""

    OPEN = "open"
    CONTEXT = "context"  # a context window was full; the agent may go on with a shorter history
    BUDGET_TOKENS = "budget_tokens"
    TURNS = "turns"
    STALE = "stale"  # weights older than the contract allows would take part
    DEADLINE = "deadline"
    ABORTED = "aborted"  # together with its group
    FINALIZED = "finalized"
    EXPIRED = "expired"  # forgotten, because it was idle or room was needed
    DELETED = "deleted"  # forgotten; turns in flight finish and are not recorded
    DISCARDED = "discarded"  # forgotten, and turns in flight are ended with it

    @property
    def reason(self) -> str:
        """The end reason as users read it."""
        shown = SessionStatus.DELETED if self is SessionStatus.DISCARDED else self
        return str(shown.value)

    @property
    def stops_turns(self) -> bool:
        """Whether turns in flight were ended, and no further one may begin."""
        return self in (*STOPPED, SessionStatus.DISCARDED)

    @property
    def is_forgotten(self) -> bool:
        """Whether the store no longer holds the session."""
        return self in FORGOTTEN

    @property
    def is_over(self) -> bool:
        """Whether the session's work is done: a full context alone does not end it."""
        return self not in (SessionStatus.OPEN, SessionStatus.CONTEXT)


Statuses = Collection[SessionStatus]

#: Each turn is refused by its own check: a later one may still fit, such as the repetition of a turn that was counted.
SPENT: Statuses = (SessionStatus.BUDGET_TOKENS, SessionStatus.TURNS, SessionStatus.STALE)
STOPPED: Statuses = (SessionStatus.DEADLINE, SessionStatus.ABORTED)
FORGOTTEN: Statuses = (SessionStatus.EXPIRED, SessionStatus.DELETED, SessionStatus.DISCARDED)

#: Which status may follow each; any other end leaves the status as it is.
NEXT: Mapping[SessionStatus, Statuses] = {
    SessionStatus.OPEN: (SessionStatus.CONTEXT, *SPENT, *STOPPED, SessionStatus.FINALIZED, *FORGOTTEN),
    SessionStatus.CONTEXT: (SessionStatus.OPEN, *SPENT, *STOPPED, SessionStatus.FINALIZED, *FORGOTTEN),
    **dict.fromkeys(SPENT, (*STOPPED, SessionStatus.FINALIZED, *FORGOTTEN)),
    SessionStatus.DEADLINE: (SessionStatus.ABORTED, SessionStatus.FINALIZED, *FORGOTTEN),
    SessionStatus.ABORTED: (SessionStatus.DEADLINE, SessionStatus.FINALIZED, *FORGOTTEN),
    SessionStatus.FINALIZED: FORGOTTEN,
    **dict.fromkeys(FORGOTTEN, ()),
}


@dataclass(frozen=True)
class SessionEnd:
    """How far a session has come to its end.

    Attributes:
        status: what may still happen in it.
        cause: the first status that ended its work, which records and samples name as `end_reason`; None if none did.
            It outlasts FINALIZED and what comes later, which say nothing about the work.
    """

    status: SessionStatus = SessionStatus.OPEN
    cause: SessionStatus | None = None

    def after(self, end: SessionStatus) -> SessionEnd:
        """Return the state once `end` has come about as well."""
        status = end if end in NEXT[self.status] else self.status
        full = self.cause is SessionStatus.CONTEXT and end in (*SPENT, *STOPPED)
        return SessionEnd(status, end if self.cause is None or full else self.cause)

    def reopened(self) -> SessionEnd:
        """Return the state once a turn is recorded: a full context no longer ends the work."""
        status = SessionStatus.OPEN if SessionStatus.OPEN in NEXT[self.status] else self.status
        return SessionEnd(status, None if self.cause is SessionStatus.CONTEXT else self.cause)

    @property
    def reason(self) -> str | None:
        """The end reason as users read it; None while the work goes on."""
        return None if self.cause is None else self.cause.reason

    @property
    def stopped_by(self) -> str | None:
        """Why turns in flight were ended, for the session's row; None if they were not."""
        return self.status.reason if self.status in STOPPED else None


def restored_end(reason: str | None, stopped_by: str | None, *, finalized: bool) -> SessionEnd:
    """Return the state that was written as these fields of a session's row.

    Raises:
        ValueError: a field names no status.
    """
    cause = None if reason is None else SessionStatus(reason)
    if finalized:
        return SessionEnd(SessionStatus.FINALIZED, cause)
    status = cause or SessionStatus.OPEN if stopped_by is None else SessionStatus(stopped_by)
    return SessionEnd(status, cause)
