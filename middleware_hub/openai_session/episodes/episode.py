"""What becomes of an episode under its contract: what it has used, and what runs. Pure, but for waiting."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from middleware_hub.openai_session.episodes.contract import Budget, Contract, Group, SessionStatus
from miles_router.errors import BadRequest, RouterError

#: How often a turn that its client has left may be repeated under its id as the same turn. Beyond, it is another one.
FREE_REPETITIONS = 2


class Ledger:
    """What an episode has used of its budget. A turn reserves what it may take, so that turns at the same time never
    take more than there is."""

    def __init__(self) -> None:
        self.tokens = 0  # sampled, in turns that are recorded
        self.turns = 0  # requests that are recorded
        self._reserved: dict[object, int] = {}
        self._counted: dict[object, int] = {}  # how often turns with an id were, by what repetitions have in common

    def reserve(self, turn: object, tokens: int) -> None:
        """A turn begins, and may sample so many tokens."""
        self._reserved[turn] = tokens

    def settle(self, turn: object, tokens: int, repeat_key: object = None) -> None:
        """It is recorded with so many, or its client has left. `repeat_key`: what it and its repetitions have in
        common; together they are one turn."""
        self._reserved.pop(turn, None)
        self.tokens += tokens
        self.turns += not self._is_free(repeat_key)
        if repeat_key is not None:
            self._counted[repeat_key] = self._counted.get(repeat_key, 0) + 1

    def _is_free(self, repeat_key: object) -> bool:
        """Whether a turn is the repetition of one that was counted."""
        return 0 < self._counted.get(repeat_key, 0) <= FREE_REPETITIONS

    def reserved_by(self, turn: object) -> int:
        """Tokens that a turn may take."""
        return self._reserved.get(turn, 0)

    def release(self, turn: object) -> None:
        """It is over, recorded or not."""
        self._reserved.pop(turn, None)

    @property
    def reserved(self) -> int:
        """Turns that run."""
        return len(self._reserved)

    def tokens_left(self, budget: Budget) -> int | None:
        """What is neither sampled nor reserved; None: without a bound."""
        if budget.max_tokens is None:
            return None
        return max(0, budget.max_tokens - self.tokens - sum(self._reserved.values()))

    def has_turns(self, budget: Budget, repeat_key: object = None) -> bool:
        """Whether one more turn, or the repetition of one that was counted, may begin."""
        if budget.max_turns is None or self._is_free(repeat_key):
            return True
        return self.turns + len(self._reserved) < budget.max_turns

    @property
    def used(self) -> dict[str, int]:
        """For those who read the session."""
        return {"tokens": self.tokens, "turns": self.turns}


@dataclass(frozen=True)
class Allowance:
    """What is left for a turn; `end` and `limit` say of what there is least."""

    tokens: int | None  # for each choice; None: without a bound
    end: SessionStatus = SessionStatus.BUDGET_TOKENS
    limit: int = 0


def allowance(budget: Budget, ledger: Ledger, *, prompt: int | None, choices: int, window: int | None) -> Allowance:
    """How many tokens each of a turn's choices may have, for a prompt of so many tokens (None: not known) and an engine
    whose window holds so many."""
    windows = [limit for limit in (budget.max_context, window) if limit is not None and prompt is not None]
    bounds = [(max(0, limit - (prompt or 0)), SessionStatus.CONTEXT, limit) for limit in windows]
    left = ledger.tokens_left(budget)
    if left is not None:
        bounds.append((left // choices, SessionStatus.BUDGET_TOKENS, budget.max_tokens or 0))
    return Allowance(*min(bounds, key=lambda bound: bound[0])) if bounds else Allowance(None)


def asked_tokens(request: Mapping[str, Any], lengths: Sequence[str], default: int | None) -> int | None:
    """How many tokens a request asks for each choice; None: as many as fit.

    Args:
        lengths: the fields that say it; what stands first counts.
        default: of a request that does not say.

    Raises:
        BadRequest: nobody can tell.
    """
    given = [name for name in lengths if request.get(name) is not None]
    for name in given:
        if type(request[name]) is not int or request[name] < 1:
            raise BadRequest(f"{name} must be a whole number from 1: the session has a contract")
    if given:
        return int(request[given[0]])
    return None if any(name in request for name in lengths) else default


def cut(request: Mapping[str, Any], lengths: Sequence[str], tokens: int) -> Mapping[str, Any]:
    """A request for at most so many tokens."""
    names = [name for name in lengths if request.get(name) is not None] or lengths[-1:]
    least = request.get("min_tokens")
    shorter = {"min_tokens": tokens} if isinstance(least, int) and least > tokens else {}
    return {**request, **dict.fromkeys(names, tokens), **shorter}


def choices_of(request: Mapping[str, Any], prompts: int) -> int:
    """How many choices an answer will have.

    Raises:
        BadRequest: nobody can tell.
    """
    n = request.get("n")
    if n is not None and (type(n) is not int or n < 1):
        raise BadRequest("n must be a whole number from 1: the session has a contract")
    return prompts * (n or 1)


class OnItsWay(Protocol):
    """Where a request is: how many generations of it wait now, and for how many seconds some have."""

    waits: int
    waited: float


class Stoppable(Protocol):
    """A turn that runs."""

    stopped_by: RouterError | None

    @property
    def flight(self) -> OnItsWay:
        """Where its request is."""
        ...

    def stop(self, error: RouterError, *, keep: bool) -> None:
        """End it at the engine; `keep`: what was sampled until now stays."""
        ...


class EpisodeState:
    """One session's contract, and how far it has come."""

    def __init__(self, contract: Contract, began: float) -> None:
        self.contract = contract
        self.began = began  # by a clock that never jumps
        self.ledger = Ledger()
        self.running: set[Stoppable] = set()
        #: Opens the session for its agent.
        self.key = f"sk-{secrets.token_urlsafe(32)}" if contract.key else None
        self._freed = asyncio.Event()

    @property
    def given(self) -> Mapping[str, Any]:
        """The contract as it was asked for."""
        return self.contract.given

    def deadline(self) -> float | None:
        """When its time is up, by the clock of `began`."""
        seconds = self.contract.budget.deadline_s
        return None if seconds is None else self.began + seconds

    def group(self, metadata: Mapping[str, Any]) -> Group | None:
        """What it is aborted with: by its contract, or by its metadata, which anybody wrote."""
        named = (self.contract.group, metadata.get("group"), metadata.get("instance_id"))
        return next((name for name in named if isinstance(name, (str, int)) and not isinstance(name, bool)), None)

    def settle(self, turn: object, tokens: int, repeat_key: object = None) -> None:
        """Count a turn of so many tokens."""
        self.ledger.settle(turn, tokens, repeat_key)
        self._freed.set()

    def release(self, turn: object) -> None:
        """A turn is over, recorded or not."""
        self.ledger.release(turn)
        self._freed.set()

    async def freed(self) -> None:
        """Wait until some turn is over."""
        self._freed.clear()
        await self._freed.wait()
