"""What becomes of an episode under its contract: what it has used, and what runs. Pure, but for waiting."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from typing import Any, Protocol

from middleware_hub.openai_session.episodes.contract import Contract, Group
from middleware_hub.openai_session.episodes.ledger import Ledger
from miles_router.errors import RouterError


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
