"""Compare text rollouts in memory with what engines compute for the same tokens.

Clients write the prompts, so no chat template is compared.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from middleware_hub.auditing.asking import Asker
from middleware_hub.auditing.audits import AuditSource, HeldEpisode
from middleware_hub.auditing.samples import AuditReport, LineAuditor
from middleware_hub.auditing.spans import AuditedLine, AuditedTurn
from middleware_hub.radix_tree.dashboard.rollouts import TextRollouts
from middleware_hub.radix_tree.dashboard.turns import TextTurn
from miles_router.trajectory import Trajectory

#: Why no prompt is compared.
NO_MESSAGES = "no_messages"


class TextAuditor:
    """The audit source of one router's text rollouts."""

    def __init__(self, rollouts: TextRollouts, asker: Asker) -> None:
        self._rollouts = rollouts
        self._lines = LineAuditor(asker)

    async def list_episodes(self) -> AsyncIterator[HeldEpisode]:
        """Yield the rollouts in memory that have turns."""
        for rollout in self._rollouts:
            if rollout.turns:
                yield HeldEpisode(rollout.id, len(rollout.turns), rollout.used_at)

    async def audit(self, episode_id: str, limit: int) -> AuditReport | None:
        """Audit the newest `limit` leaves of a rollout; return None if the rollout is unknown."""
        rollout = self._rollouts.get(episode_id)
        if rollout is None:
            return None
        leaves = rollout.leaves()[-limit:]
        prompts = {turn.number for leaf in leaves for turn in leaf.line()}
        report = await self._lines.audit(map(_audited, leaves))
        report.prompts.not_compared[NO_MESSAGES] += len(prompts)
        return report


def _audited(leaf: TextTurn) -> AuditedLine:
    line, trajectory = leaf.line(), leaf.entry.trajectory()
    ends = [*(turn.kept for turn in line[1:]), len(leaf.entry)]
    turns = [_audited_turn(turn, end) for turn, end in zip(line, ends, strict=True)]
    return AuditedLine(leaf.number, trajectory, [_before(line[0], trajectory), *turns])


def _audited_turn(turn: TextTurn, end: int) -> AuditedTurn:
    entry = turn.entry
    return AuditedTurn(
        number=turn.number,
        start=turn.prompt,
        end=end,
        pieces=entry.suffix(turn.prompt)[0].pieces,
        worker=turn.facts.worker,
        cache_versions=entry.cache_versions,
        asked=entry.asked,
        chat=False,
    )


def _before(first: TextTurn, trajectory: Trajectory) -> AuditedTurn:
    """Return the first turn's prompt. Sampled tokens in it belong to evicted generations."""
    given = trajectory[: first.prompt].pieces
    return AuditedTurn(-1 - first.number, 0, first.prompt, given, None, (), None, chat=False)


_source: type[AuditSource] = TextAuditor
