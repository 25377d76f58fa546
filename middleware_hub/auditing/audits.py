"""What the layers of a router hold that can be audited."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple, Protocol

from middleware_hub.auditing.asking import Asker
from middleware_hub.auditing.samples import AuditReport
from miles_router.middlewares import Router

NAME = "audits"


class HeldEpisode(NamedTuple):
    """An episode that has something recorded; `last_used_at` in Unix seconds."""

    id: str
    turns: int
    last_used_at: float


class AuditSource(Protocol):
    """A layer's episodes."""

    def held(self) -> AsyncIterator[HeldEpisode]:
        """All that have something recorded."""
        ...

    async def audit(self, episode_id: str, limit: int) -> AuditReport | None:
        """Audit the newest `limit` samples of one; None where it is not here.

        Raises:
            RouterError: no worker can be asked.
        """
        ...


class Audits:
    """Those of one router, by the kinds of its episodes. All layers ask the engines through one asker."""

    def __init__(self, router: Router) -> None:
        self.asker = Asker(router)
        self.owners = router.owners
        self._sources: dict[str, AuditSource] = {}

    @classmethod
    def of(cls, router: Router) -> Audits:
        """The router's one."""
        found: Audits | None = getattr(router.state, NAME, None)
        if found is None:
            found = cls(router)
            setattr(router.state, NAME, found)
        return found

    def add(self, kind: str, source: AuditSource) -> None:
        """A layer holds episodes of this kind."""
        self._sources[kind] = source

    @property
    def sources(self) -> Mapping[str, AuditSource]:
        """The layers' episodes, by their kind."""
        return self._sources
