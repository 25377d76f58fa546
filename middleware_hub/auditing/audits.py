"""The episodes of a router's layers that can be audited."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple, Protocol

from middleware_hub.auditing.asking import Asker
from middleware_hub.auditing.samples import AuditReport
from miles_router.middlewares import Router

NAME = "audits"


class HeldEpisode(NamedTuple):
    """An episode with recorded tokens; `last_used_at` is in Unix seconds."""

    id: str
    turns: int
    last_used_at: float


class AuditSource(Protocol):
    """A layer whose episodes can be audited."""

    def list_episodes(self) -> AsyncIterator[HeldEpisode]:
        """Yield all episodes with recorded tokens."""
        ...

    async def audit(self, episode_id: str, limit: int) -> AuditReport | None:
        """Audit the newest `limit` samples of an episode; return None if this process does not have it.

        Raises:
            RouterError: no worker can be asked.
        """
        ...


class Audits:
    """The audit sources of one router, by kind of episode. All layers share one client for the engines."""

    def __init__(self, router: Router) -> None:
        self.asker = Asker(router)
        self.owners = router.owners
        self._sources: dict[str, AuditSource] = {}

    @classmethod
    def of(cls, router: Router) -> Audits:
        """Return the router's instance, which the first call creates."""
        found: Audits | None = getattr(router.state, NAME, None)
        if found is None:
            found = cls(router)
            setattr(router.state, NAME, found)
        return found

    def add(self, kind: str, source: AuditSource) -> None:
        """Register the layer that has the episodes of this kind."""
        self._sources[kind] = source

    @property
    def sources(self) -> Mapping[str, AuditSource]:
        """The registered layers, by kind of episode."""
        return self._sources
