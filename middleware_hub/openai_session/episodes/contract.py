"""The contract of an episode with its used budget and running turns, and the state of a session's end, with or without
a contract. Pure, except for waiting.

A contract is set when its session is created. It limits what the agent may use, fixes settings, bounds the age of
weights, and sets a deadline:

    budget     max_tokens, max_context, max_turns, deadline_s
    sampling   settings that override the agent's
    model      name, lora
    freshness  oldest_version, otherwise
    media      refuse, or replace: images and similar parts
    key        an API key of the session's own
    group      the sessions that are aborted together
    evaluation one weight version samples the whole episode, which is not for training
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from miles_router.errors import BadRequest

if TYPE_CHECKING:
    from middleware_hub.openai_session.turns.keeper import RunningTurn

#: For a fixed setting, other settings of a request with the same effect; they are removed.
SAME_EFFECT = {"stop": ("stop_token_ids", "stop_regex")}
REFUSE, MARK, REPLACE, WAIT = "refuse", "mark", "replace", "wait"
Group = str | int


@dataclass(frozen=True)
class Budget:
    """Limits of an episode; None means unlimited.

    Attributes:
        max_tokens: sampled tokens of all turns together.
        max_context: tokens of the prompt and the answer of one turn.
        max_turns: recorded requests.
        deadline_s: seconds from the creation of the session.
    """

    max_tokens: int | None = None
    max_context: int | None = None
    max_turns: int | None = None
    deadline_s: float | None = None

    @property
    def limits_usage(self) -> bool:
        """Whether a limit depends on the usage of earlier turns."""
        return self.max_tokens is not None or self.max_turns is not None

    @property
    def limits_length(self) -> bool:
        """Whether a limit depends on the length of prompts."""
        return self.max_tokens is not None or self.max_context is not None


@dataclass(frozen=True)
class Model:
    """The model name that the agent sees, and the engine's name of the adapter that answers."""

    name: str | None = None
    lora: str | None = None


@dataclass(frozen=True)
class Freshness:
    """The oldest weight version that may take part, and what happens to older ones. `otherwise` is `REFUSE` (turns are
    refused) or `MARK` (their samples are marked as stale)."""

    oldest_version: int | None = None
    otherwise: str = REFUSE

    def is_stale(self, version: str | None) -> bool:
        """Return whether weights of this version are too old. A version that is not a number counts as too old."""
        if self.oldest_version is None:
            return False
        return version is None or not version.isdecimal() or int(version) < self.oldest_version


@dataclass(frozen=True)
class Contract:
    """One contract. `given` is the JSON that the client sent, for display. `evaluation`: what happens to turns of an
    evaluation while the fleet has other weights, `REFUSE` or `WAIT`; None for an episode that is no evaluation."""

    budget: Budget = field(default_factory=Budget)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    model: Model = field(default_factory=Model)
    freshness: Freshness = field(default_factory=Freshness)
    media: str | None = None
    key: bool = False
    group: Group | None = None
    evaluation: str | None = None
    given: Mapping[str, Any] = field(default_factory=dict)

    def apply_fixed(self, request: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """Apply the fixed settings to a request. Returns the changed request, and the agent's own values that they
        override."""
        fixed: dict[str, Any] = dict(self.sampling)
        if self.model.lora is not None:
            fixed["lora_path"] = self.model.lora
        if self.model.name is not None:
            fixed["model"] = self.model.name
        elif self.model.lora is not None:
            fixed |= base_model(request)
        if not fixed:
            return request, {}
        instead = [other for name in fixed for other in SAME_EFFECT.get(name, ())]
        asked = {
            name: request[name]
            for name in (*fixed, *instead)
            if request.get(name) is not None and request[name] != fixed.get(name)
        }
        kept = {name: value for name, value in request.items() if name not in instead}
        return {**kept, **fixed}, asked


def base_model(request: Mapping[str, Any]) -> dict[str, str]:
    """Return a `model` field without the adapter that the request names behind a colon. SGLang reads that adapter, and
    prefers it to `lora_path`. Empty if the request names no adapter."""
    model = request.get("model")
    return {"model": model.partition(":")[0]} if isinstance(model, str) and ":" in model else {}


NO_CONTRACT = Contract()


class SessionStatus(Enum):
    """The status of a session. Every status but OPEN is an end."""

    OPEN = "open"
    CONTEXT = "context"  # a context window was full; the agent may go on with a shorter history
    BUDGET_TOKENS = "budget_tokens"
    TURNS = "turns"
    STALE = "stale"  # the weights are older than the contract allows
    DEADLINE = "deadline"
    ABORTED = "aborted"  # together with its group
    FINALIZED = "finalized"
    EXPIRED = "expired"  # forgotten, because it was idle or its memory was needed
    DELETED = "deleted"  # forgotten; turns in flight finish and are not recorded
    DISCARDED = "discarded"  # forgotten, and turns in flight are cancelled

    @property
    def reason(self) -> str:
        """The end reason for users."""
        shown = SessionStatus.DELETED if self is SessionStatus.DISCARDED else self
        return str(shown.value)

    @property
    def allows_turns(self) -> bool:
        """Whether another turn may begin. A status in `SPENT` leaves that to the check of each turn."""
        return self not in (*STOPPED, SessionStatus.FINALIZED, SessionStatus.DISCARDED)

    @property
    def is_forgotten(self) -> bool:
        return self in FORGOTTEN

    @property
    def is_over(self) -> bool:
        """Whether the session's work is done. A full context alone does not end it."""
        return self not in (SessionStatus.OPEN, SessionStatus.CONTEXT)


Statuses = Collection[SessionStatus]

#: In these, each turn is checked separately: a later turn may still fit, such as the repetition of a counted turn.
SPENT: Statuses = (SessionStatus.BUDGET_TOKENS, SessionStatus.TURNS, SessionStatus.STALE)
#: These cancel turns in flight.
STOPPED: Statuses = (SessionStatus.DEADLINE, SessionStatus.ABORTED)
FORGOTTEN: Statuses = (SessionStatus.EXPIRED, SessionStatus.DELETED, SessionStatus.DISCARDED)

#: The statuses that may follow each one; any other end leaves the status unchanged.
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
    """The state of a session's end.

    Attributes:
        status: what may still happen in the session.
        cause: the first status that ended the session's work; records and samples contain it as `end_reason`. None
            while the work goes on. FINALIZED and later statuses do not replace it, because they say nothing about the
            work.
    """

    status: SessionStatus = SessionStatus.OPEN
    cause: SessionStatus | None = None

    def after(self, end: SessionStatus) -> SessionEnd:
        """Return the state after another end."""
        status = end if end in NEXT[self.status] else self.status
        full = self.cause is SessionStatus.CONTEXT and end in (*SPENT, *STOPPED)
        return SessionEnd(status, end if self.cause is None or full else self.cause)

    def reopened(self) -> SessionEnd:
        """Return the state after a turn is recorded: a full context no longer ends the work."""
        status = SessionStatus.OPEN if SessionStatus.OPEN in NEXT[self.status] else self.status
        return SessionEnd(status, None if self.cause is SessionStatus.CONTEXT else self.cause)

    @property
    def reason(self) -> str | None:
        """The end reason for users; None while the work goes on."""
        return None if self.cause is None else self.cause.reason

    @property
    def stopped_by(self) -> str | None:
        """The reason why turns in flight were cancelled, for the stored head; None if they were not."""
        return self.status.reason if self.status in STOPPED else None


def restored_end(reason: str | None, stopped_by: str | None, *, finalized: bool) -> SessionEnd:
    """Return the state that was stored in these fields of a session's head.

    Raises:
        ValueError: a field names no status.
    """
    cause = None if reason is None else SessionStatus(reason)
    if finalized:
        return SessionEnd(SessionStatus.FINALIZED, cause)
    status = cause or SessionStatus.OPEN if stopped_by is None else SessionStatus(stopped_by)
    return SessionEnd(status, cause)


#: How often a turn may be repeated under its id after its client disconnected. Further repetitions count as new turns.
FREE_REPETITIONS = 2


class Ledger:
    """The usage of an episode's budget. A turn reserves its maximum, so that concurrent turns never exceed the budget
    together."""

    def __init__(self) -> None:
        self.tokens = 0  # sampled, in turns that are recorded
        self.turns = 0  # requests that are recorded
        self._reserved: dict[object, int] = {}
        self._settled: dict[object, int] = {}  # settled turns by repeat key

    def reserve(self, turn: object, tokens: int) -> None:
        """Reserve tokens for a turn that begins."""
        self._reserved[turn] = tokens

    def settle(self, turn: object, tokens: int, repeat_key: object = None) -> None:
        """Count the sampled tokens of a turn that was recorded, or whose client disconnected. Turns with an equal
        `repeat_key` are repetitions and count as one turn."""
        self._reserved.pop(turn, None)
        self.tokens += tokens
        self.turns += not self._is_free(repeat_key)
        if repeat_key is not None:
            self._settled[repeat_key] = self._settled.get(repeat_key, 0) + 1

    def _is_free(self, repeat_key: object) -> bool:
        """Return whether a turn repeats a counted turn and does not count itself."""
        return 0 < self._settled.get(repeat_key, 0) <= FREE_REPETITIONS

    def reserved_by(self, turn: object) -> int:
        """Return the tokens that a turn may still sample."""
        return self._reserved.get(turn, 0)

    def release(self, turn: object) -> None:
        """Drop the reservation of a turn that is over, recorded or not."""
        self._reserved.pop(turn, None)

    @property
    def reserved(self) -> int:
        """The number of turns in progress."""
        return len(self._reserved)

    def tokens_left(self, budget: Budget) -> int | None:
        """Return the tokens that are neither sampled nor reserved; None without a limit."""
        if budget.max_tokens is None:
            return None
        return max(0, budget.max_tokens - self.tokens - sum(self._reserved.values()))

    def has_turns(self, budget: Budget, repeat_key: object = None) -> bool:
        """Return whether another turn may begin. The repetition of a counted turn always may."""
        if budget.max_turns is None or self._is_free(repeat_key):
            return True
        return self.turns + len(self._reserved) < budget.max_turns

    @property
    def used(self) -> dict[str, int]:
        """The used tokens and turns, for display."""
        return {"tokens": self.tokens, "turns": self.turns}


@dataclass(frozen=True)
class Allowance:
    """The tokens left for a turn. `end` and `limit` describe the tightest bound."""

    tokens: int | None  # for each choice; None means unlimited
    end: SessionStatus = SessionStatus.BUDGET_TOKENS
    limit: int = 0


def allowance(budget: Budget, ledger: Ledger, *, prompt: int | None, choices: int, window: int | None) -> Allowance:
    """Return how many tokens each choice of a turn may have.

    Args:
        prompt: the length of the prompt in tokens; None if unknown.
        choices: the number of choices of the turn.
        window: the engine's context window in tokens; None if unknown.
    """
    windows = [limit for limit in (budget.max_context, window) if limit is not None and prompt is not None]
    bounds = [(max(0, limit - (prompt or 0)), SessionStatus.CONTEXT, limit) for limit in windows]
    left = ledger.tokens_left(budget)
    if left is not None:
        bounds.append((left // choices, SessionStatus.BUDGET_TOKENS, budget.max_tokens or 0))
    return Allowance(*min(bounds, key=lambda bound: bound[0])) if bounds else Allowance(None)


def asked_tokens(request: Mapping[str, Any], lengths: Sequence[str], default: int | None) -> int | None:
    """Return how many tokens a request asks for each choice; None for as many as fit.

    Args:
        lengths: the names of the request's length fields; the first one present counts.
        default: the result for a request without these fields.

    Raises:
        BadRequest: a field is not a positive whole number.
    """
    given = [name for name in lengths if request.get(name) is not None]
    for name in given:
        if type(request[name]) is not int or request[name] < 1:
            raise BadRequest(f"{name} must be a whole number from 1: the session has a contract")
    if given:
        return int(request[given[0]])
    return None if any(name in request for name in lengths) else default


def limit_tokens(request: Mapping[str, Any], lengths: Sequence[str], tokens: int) -> Mapping[str, Any]:
    """Return the request, limited to `tokens` tokens."""
    names = [name for name in lengths if request.get(name) is not None] or lengths[-1:]
    least = request.get("min_tokens")
    shorter = {"min_tokens": tokens} if isinstance(least, int) and least > tokens else {}
    return {**request, **dict.fromkeys(names, tokens), **shorter}


def choices_of(request: Mapping[str, Any], prompts: int) -> int:
    """Return how many choices the answer to a request has.

    Raises:
        BadRequest: `n` is not a positive whole number.
    """
    n = request.get("n")
    if n is not None and (type(n) is not int or n < 1):
        raise BadRequest("n must be a whole number from 1: the session has a contract")
    return prompts * (n or 1)


class EpisodeState:
    """The contract of one session, and its progress."""

    def __init__(self, contract: Contract, began: float) -> None:
        self.contract = contract
        self.began = began  # by a monotonic clock
        self.ledger = Ledger()
        self.running: set[RunningTurn] = set()
        #: The API key of the session, if its contract asks for one.
        self.key = f"sk-{secrets.token_urlsafe(32)}" if contract.key else None
        self._freed = asyncio.Event()

    @property
    def given(self) -> Mapping[str, Any]:
        """The contract's JSON as the client sent it."""
        return self.contract.given

    def deadline(self) -> float | None:
        """Return the deadline by the clock of `began`, or None."""
        seconds = self.contract.budget.deadline_s
        return None if seconds is None else self.began + seconds

    def group(self, metadata: Mapping[str, Any]) -> Group | None:
        """Return the group of the session, from its contract or else from its metadata; None if neither names a valid
        one. Clients write the metadata unchecked, and an evaluation's metadata may name groups of training."""
        if self.contract.evaluation is not None:
            return self.contract.group
        named = (self.contract.group, metadata.get("group"), metadata.get("instance_id"))
        return next((name for name in named if isinstance(name, (str, int)) and not isinstance(name, bool)), None)

    def settle(self, turn: object, tokens: int, repeat_key: object = None) -> None:
        """Count a turn that sampled `tokens` tokens, and wake `wait_until_freed`."""
        self.ledger.settle(turn, tokens, repeat_key)
        self._freed.set()

    def release(self, turn: object) -> None:
        """Drop a turn's reservation, and wake `wait_until_freed`."""
        self.ledger.release(turn)
        self._freed.set()

    async def wait_until_freed(self) -> None:
        """Wait until a turn is over."""
        self._freed.clear()
        await self._freed.wait()
