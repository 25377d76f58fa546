"""The state of an episode under its contract: its used budget and its running turns. Pure, except for waiting."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from middleware_hub.openai_session.episodes.contract import Budget, Contract, Group, SessionStatus
from miles_router.errors import BadRequest

if TYPE_CHECKING:
    from middleware_hub.openai_session.turns.keeper import RunningTurn

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
