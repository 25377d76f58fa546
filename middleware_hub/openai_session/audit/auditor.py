"""Sessions as they are held now, against what engines and the chat template say of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from middleware_hub.openai_session.audit.asking import Asker, NotRecomputed, Said
from middleware_hub.openai_session.audit.prompts import NotRendered, PromptCheck
from middleware_hub.openai_session.audit.spans import Span, comparable, distribution
from middleware_hub.openai_session.export.selection import trained_elsewhere
from middleware_hub.openai_session.sessions.tree import Session, Turn, line_trajectory
from miles_router.middlewares import Pace, Router
from miles_router.trajectory.pieces import Logprobs, Tokens

#: Tokens of a sample that are asked for one by one, where an engine tells no others at their temperature.
ONE_BY_ONE = 32
NOT_ASKED = "not_asked"
#: Differences of prompts that an answer shows, and characters of what an engine says of a request that it refuses.
SHOWN, SHOWN_CHARS = 16, 500


@dataclass
class PromptReport:
    """What came of the prompts of some turns."""

    compared: int = 0
    differ: int = 0
    differences: list[Mapping[str, Any]] = field(default_factory=list)
    not_compared: Counter[str] = field(default_factory=Counter)

    def as_json(self) -> dict[str, Any]:
        """For the answer."""
        shown = {"compared": self.compared, "differ": self.differ, "differences": self.differences}
        return {**shown, "not_compared": dict(self.not_compared)}


class Auditor:
    """Audits sessions of one router."""

    def __init__(self, router: Router, prompts: PromptCheck) -> None:
        self._router = router
        self._asker = Asker(router)
        self._prompts = prompts

    async def audit(self, session: Session, limit: int) -> dict[str, Any]:
        """Audit the newest leaves of a session, as it is now; each token in one of them.

        Raises:
            RouterError: no worker can be asked.
        """
        leaves = [leaf for leaf in session.leaves() if any(turn.sampled for turn in leaf.line())][-limit:]
        now, seen, prompts = self._router.pool.weight_version, set[Turn](), PromptReport()
        samples = []
        for leaf, elsewhere in zip(leaves, trained_elsewhere(leaves), strict=True):
            line = leaf.line()
            samples.append(await self._sample(line, elsewhere, now))
            await self._check_prompts(line, seen, prompts)
            seen.update(line)
        return {"session_id": session.id, "weight_version": now, "samples": samples, "prompts": prompts.as_json()}

    async def _check_prompts(self, line: Sequence[Turn], seen: set[Turn], report: PromptReport) -> None:
        pace = Pace()
        for turn in line:
            if turn in seen:
                continue
            await pace.step()
            try:
                difference = await self._prompts.difference(turn, line[0])
            except NotRendered as reason:
                report.not_compared[str(reason)] += 1
                continue
            report.compared += 1
            if difference is not None:
                report.differ += 1
                report.differences += [difference][: SHOWN - len(report.differences)]

    async def _sample(self, line: Sequence[Turn], elsewhere: Mapping[Turn, int], now: str | None) -> dict[str, Any]:
        distributions = {turn: distribution(turn, await self._asker.assumed(turn)) for turn in line}
        found = comparable(line, elsewhere, now, await self._asker.longest(), distributions)
        trajectory = line_trajectory(line)
        report = SampleReport(trajectory.tokens, trajectory.logprobs, Counter(found.others))
        for asked in dict.fromkeys((span.adapter, span.temperature) for span in found.spans):
            spans = [span for span in found.spans if (span.adapter, span.temperature) == asked]
            await (self._compare(spans, report) if asked[1] == 1 else self._compare_some(spans, report))
        return {
            "leaf": line[-1].number,
            "tokens": len(trajectory),
            "compared": sum(each["end"] - each["start"] for each in report.shown),
            "spans": report.shown,
            "not_comparable": dict(report.others),
            "refusals": report.refusals,
        }

    async def _compare(self, spans: Sequence[Span], report: SampleReport) -> None:
        """Compare all of their tokens by one question."""
        start, stop = spans[0].start - 1, spans[-1].end
        try:
            said = await self._asker.all(
                report.tokens[:stop], start, spans[0].adapter, spans[0].version, _workers(spans)
            )
        except NotRecomputed as failure:
            report.add_failure(failure, sum(span.end - span.start for span in spans))
            return
        for span in spans:
            report.add(span, said, start + 1)

    async def _compare_some(self, spans: Sequence[Span], report: SampleReport) -> None:
        """Compare some of their tokens one by one: what is told of prompts is not divided by the temperature."""
        positions = np.concatenate([np.arange(span.start, span.end) for span in spans])
        picked = np.unique(np.linspace(0, len(positions) - 1, min(ONE_BY_ONE, len(positions))).astype(int))
        if len(picked) < len(positions):
            report.others[NOT_ASKED] += len(positions) - len(picked)
        for position in map(int, positions[picked]):
            span = next(span for span in spans if span.start <= position < span.end)
            ids, token = report.tokens[:position], int(report.tokens[position])
            try:
                said = await self._asker.next(ids, token, span.temperature, span.adapter, span.version, _workers(spans))
            except NotRecomputed as failure:
                report.add_failure(failure, 1)
                continue
            report.add(span._replace(start=position, end=position + 1), said, position)


@dataclass
class SampleReport:
    """What came of one line's tokens."""

    tokens: Tokens
    logprobs: Logprobs
    others: Counter[str]
    shown: list[dict[str, Any]] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def add(self, span: Span, said: Said, first: int) -> None:
        """A span that was compared; the first logprob that was said is of position `first`."""
        self.shown.append(
            {
                "turn": span.turn.number,
                "start": span.start,
                "end": span.end,
                "version": span.version,
                "worker": span.turn.facts.get("worker"),
                "recomputed_by": said.worker,
                "recorded": self.logprobs[span.start : span.end],
                "recomputed": said.logprobs[span.start - first : span.end - first],
            }
        )

    def add_failure(self, failure: NotRecomputed, tokens: int) -> None:
        """So many tokens that no engine has told."""
        self.others[failure.reason] += tokens
        said = failure.said[:SHOWN_CHARS]
        if said and said not in self.refusals:
            self.refusals.append(said)


def _workers(spans: Sequence[Span]) -> set[str]:
    """Those that sampled them."""
    return {str(span.turn.facts.get("worker")) for span in spans}
