"""Compares recorded sessions with what engines and the chat template say now."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from middleware_hub.auditing.asking import Asker
from middleware_hub.auditing.audits import AuditSource, HeldEpisode
from middleware_hub.auditing.routes import read_limit, written_report
from middleware_hub.auditing.samples import AuditReport, LineAuditor, PromptReport
from middleware_hub.auditing.spans import AuditedLine, AuditedTurn
from middleware_hub.openai_session.archive.archive import SessionArchive
from middleware_hub.openai_session.audit.prompts import NotRendered, PromptCheck
from middleware_hub.openai_session.sessions.session import Session
from middleware_hub.openai_session.sessions.store import SessionStore
from middleware_hub.openai_session.sessions.turn import ADAPTER, RESHAPED_BY, SAMPLING, Turn, line_ends, line_trajectory
from miles_router.engines import paths
from miles_router.engines.recomputing import AskedSampling
from miles_router.middlewares import Pace, Watch


class SessionAuditor:
    """An auditor of one router's sessions (an `AuditSource`)."""

    def __init__(self, store: SessionStore, archive: SessionArchive, asker: Asker, prompts: PromptCheck) -> None:
        self._store = store
        self._archive = archive
        self._lines = LineAuditor(asker)
        self._prompts = prompts

    def routes(self) -> Sequence[BaseRoute]:
        """Return the route `POST /sessions/{id}/audit`."""
        return [Route("/sessions/{session_id}/audit", self._answer, methods=["POST"])]

    async def _answer(self, request: Request) -> Response:
        session, limit = self._store.peek(request.path_params["session_id"]), await read_limit(request)
        with Watch(request.receive):
            return await written_report({"session_id": session.id}, await self._audit(session, limit))

    # AuditSource

    async def list_episodes(self) -> AsyncIterator[HeldEpisode]:
        """Yield all sessions with recorded turns, first those in memory, then those in the archive only."""
        self._store.expire()
        for session in self._store:
            if session.turns:
                yield HeldEpisode(session.id, len(session.turns), session.used_at)
        for kept in await self._archive.summaries():
            if kept["turns"]:
                yield HeldEpisode(kept["session_id"], kept["turns"], kept["last_used_at"])

    async def audit(self, episode_id: str, limit: int) -> AuditReport | None:
        """Audit a session, which is loaded from the archive if necessary; None if this process has no such session.

        Raises:
            RouterError: no worker can be asked.
        """
        await self._archive.load(episode_id)
        session = self._store.find(episode_id)
        return None if session is None else await self._audit(session, limit)

    # One session

    async def _audit(self, session: Session, limit: int) -> AuditReport:
        """Audit the newest `limit` leaves of a session, each token and each prompt once.

        Raises:
            RouterError: no worker can be asked.
        """
        leaves = [leaf for leaf in session.leaves() if any(turn.sampled for turn in leaf.line())][-limit:]
        report = await self._lines.audit(map(_audited, leaves))
        seen, pace = set[Turn](), Pace()
        for leaf in leaves:
            line = leaf.line()
            for turn in line:
                if turn not in seen:
                    await pace.step()
                    await self._check_prompt(turn, line[0], report.prompts)
            seen.update(line)
        return report

    async def _check_prompt(self, turn: Turn, root: Turn, report: PromptReport) -> None:
        try:
            report.add(await self._prompts.difference(turn, root))
        except NotRendered as reason:
            report.not_compared[str(reason)] += 1


def _audited(leaf: Turn) -> AuditedLine:
    line = leaf.line()
    turns = [_audited_turn(turn, end) for turn, end in zip(line, line_ends(line), strict=True)]
    return AuditedLine(leaf.number, line_trajectory(line), turns)


def _audited_turn(turn: Turn, end: int) -> AuditedTurn:
    facts = turn.facts
    return AuditedTurn(
        number=turn.number,
        start=turn.prompt_tokens,
        end=end,
        pieces=turn.sampled,
        worker=facts.get("worker"),
        cache_versions=facts.get("cache_versions") or (),
        asked=AskedSampling(facts.get(SAMPLING, {}), facts.get(RESHAPED_BY), facts.get(ADAPTER, "")),
        chat=turn.path != paths.COMPLETIONS,
    )


_source: type[AuditSource] = SessionAuditor
