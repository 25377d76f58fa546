"""Text rollouts as they are held now, against what engines say of them. No layer wrote their prompts, so that there is
nothing to render anew."""

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
    """Audits the text rollouts of one router."""

    def __init__(self, rollouts: TextRollouts, asker: Asker) -> None:
        self._rollouts = rollouts
        self._lines = LineAuditor(asker)

    async def list_episodes(self) -> AsyncIterator[HeldEpisode]:
        """As of `AuditSource`; those that are in memory."""
        for rollout in self._rollouts:
            if rollout.turns:
                yield HeldEpisode(rollout.id, len(rollout.turns), rollout.used_at)

    async def audit(self, episode_id: str, limit: int) -> AuditReport | None:
        """As of `AuditSource`."""
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
        pieces=entry.behind(turn.prompt)[0].pieces,
        worker=turn.facts.worker,
        cache_versions=entry.cache_versions,
        asked=entry.asked,
        chat=False,
    )


def _before(first: TextTurn, trajectory: Trajectory) -> AuditedTurn:
    """What the first turn of a line was given: sampled tokens in it are those of generations that are held no more."""
    given = trajectory[: first.prompt].pieces
    return AuditedTurn(-1 - first.number, 0, first.prompt, given, None, (), None, chat=False)


_source: type[AuditSource] = TextAuditor
