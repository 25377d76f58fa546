"""Evaluation episodes: which weight version their turns have, and the check of a sampled answer."""

from __future__ import annotations

from collections.abc import Sequence

from middleware_hub.openai_session.episodes.contract import WAIT
from middleware_hub.openai_session.sessions.session import Session
from miles_router.engines.answers import ABORT
from miles_router.engines.openai.choices import Choice
from miles_router.middlewares import Exchange, Router
from miles_router.middlewares.generation import Evaluation


def evaluation_of(session: Session, router: Router) -> Evaluation | None:
    """Return the evaluation that a turn of this session belongs to, pinned to the version of the recorded turns."""
    if not session.is_evaluation:
        return None
    waits = session.episode.contract.evaluation == WAIT
    began = session.turns[0].facts.get("answered_at") if session.turns else None
    return Evaluation(router.fleet, next(iter(session.weight_versions), None), began, waits=waits)


def check_evaluated(session: Session, exchange: Exchange, choices: Sequence[Choice]) -> None:
    """Check that one weight version sampled an answer and the recorded turns of its session, and that no pause cut it.

    Raises:
        WeightsChanged: the answer must not be recorded, and the agent must not get it.
    """
    if (evaluation := exchange.routing.evaluation) is None:
        return
    evaluation.check(*session.weight_versions, *(run.version for choice in choices for run in choice.versions))
    if any(choice.finish == ABORT for choice in choices) and not exchange.routing.aborted:
        raise evaluation.cut()
