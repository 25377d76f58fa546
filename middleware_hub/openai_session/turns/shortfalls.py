"""Whether a streamed turn would tell all that recording needs, by the facts of the worker that will answer."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from middleware_hub.openai_session.sessions.agent_request import AgentRequest
from miles_router.engines.facts import Facts
from miles_router.engines.openai.choices import OpenAIEndpoint
from miles_router.middlewares import Router

logger = logging.getLogger(__name__)


class ProcessShortfalls(dict[str, str]):
    """What the streams of one engine process do not tell, by endpoint. Kept with its facts, and gone with them."""

    def note(self, path: str, reason: str) -> str:
        """Keep a reason, and log it once."""
        if path not in self:
            self[path] = reason
            logger.warning("streams_are_buffered", extra={"fields": {"path": path, "reason": reason}})
        return self[path]


class StreamFacts:
    """Looks into the facts of workers, and adds what a stream has shown."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def fall_short(self, candidates: Sequence[Facts], endpoint: OpenAIEndpoint) -> bool:
        """Whether a stream of one of these engines would not tell all. Then the turn is generated whole, and given as a
        stream afterwards."""
        shortfalls = [_shortfall(facts, endpoint) for facts in candidates]
        return any(reason is not None for reason in shortfalls)

    async def learn(self, url: str, path: str, reason: str) -> None:
        """A stream of this worker's has fallen short, as others of the same process would."""
        (await self._router.fleet.facts(url)).learned(ProcessShortfalls).note(path, reason)

    async def candidates(self, turn: AgentRequest) -> Sequence[Facts]:
        """The facts of the worker that a session is tied to while that is routable; before, of all that may answer."""
        fleet, pool, turns = self._router.fleet, self._router.pool, turn.session.turns
        last = pool.find(turns[-1].facts["worker"] or "") if turns else None
        if last is not None and last in pool.routable:
            return [await fleet.facts(last.url)]
        return await fleet.all_facts()


def _shortfall(facts: Facts, endpoint: OpenAIEndpoint) -> str | None:
    known = facts.learned(ProcessShortfalls)
    reason = known.get(endpoint.path) or endpoint.shortfall(facts)
    return None if reason is None else known.note(endpoint.path, reason)
