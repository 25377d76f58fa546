"""Compares the recorded lines of an episode with the logprobs that engines compute for their tokens now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from middleware_hub.auditing.asking import Asker, NotRecomputed, Recomputation
from middleware_hub.auditing.spans import AuditedLine, Span, comparable, distribution
from miles_router.trajectory.pieces import Logprobs, Tokens

#: The most tokens of a sample that are asked for one by one: at a temperature other than 1, engines allow only that.
ONE_BY_ONE = 32
NOT_ASKED = "not_asked"
#: The most prompt differences in a report, and the most characters of an engine's refusal.
SHOWN, SHOWN_CHARS = 16, 500


@dataclass
class PromptReport:
    """The results for the prompts of some turns."""

    compared: int = 0
    differ: int = 0
    differences: list[Mapping[str, Any]] = field(default_factory=list)
    not_compared: Counter[str] = field(default_factory=Counter)

    def add(self, difference: Mapping[str, Any] | None) -> None:
        """Count a compared prompt; `difference` is None if it is the same."""
        self.compared += 1
        if difference is not None:
            self.differ += 1
            self.differences += [difference][: SHOWN - len(self.differences)]

    def as_json(self) -> dict[str, Any]:
        shown = {"compared": self.compared, "differ": self.differ, "differences": self.differences}
        return {**shown, "not_compared": dict(self.not_compared)}


@dataclass
class AuditReport:
    """The results for one episode, under the weight version that was loaded when the audit began."""

    weight_version: str | None
    samples: list[dict[str, Any]] = field(default_factory=list)
    prompts: PromptReport = field(default_factory=PromptReport)


class LineAuditor:
    """An auditor of lines of turns."""

    def __init__(self, asker: Asker) -> None:
        self._asker = asker

    async def audit(self, lines: Iterable[AuditedLine]) -> AuditReport:
        """Audit lines of one episode. A token that several lines share is audited in the first one.

        Raises:
            RouterError: no worker can be asked.
        """
        report, covered = AuditReport(self._asker.weight_version), dict[int, int]()
        for line in lines:
            report.samples.append(await self._sample(line, covered, report.weight_version))
            covered |= {turn.number: max(covered.get(turn.number, 0), turn.end - turn.start) for turn in line.turns}
        return report

    async def _sample(self, line: AuditedLine, elsewhere: Mapping[int, int], now: str | None) -> dict[str, Any]:
        distributions = {
            turn: distribution(turn.asked, await self._asker.sampling_defaults(turn.worker, chat=turn.chat))
            for turn in line.turns
        }
        found = comparable(line.turns, elsewhere, now, await self._asker.longest_prompt(), distributions)
        report = SampleReport(line.trajectory.tokens, line.trajectory.logprobs, Counter(found.excluded))
        for asked in dict.fromkeys((span.adapter, span.temperature) for span in found.spans):
            spans = [span for span in found.spans if (span.adapter, span.temperature) == asked]
            await (self._compare(spans, report) if asked[1] == 1 else self._compare_some(spans, report))
        return {
            "leaf": line.leaf,
            "tokens": len(line.trajectory),
            "compared": sum(each["end"] - each["start"] for each in report.shown),
            "spans": report.shown,
            "not_comparable": dict(report.excluded),
            "refusals": report.refusals,
        }

    async def _compare(self, spans: Sequence[Span], report: SampleReport) -> None:
        """Compare all tokens of the spans with one request."""
        start, stop = spans[0].start - 1, spans[-1].end
        try:
            recomputed = await self._asker.recompute(
                report.tokens[:stop], start, spans[0].adapter, spans[0].version, _workers(spans)
            )
        except NotRecomputed as failure:
            report.add_failure(failure, sum(span.end - span.start for span in spans))
            return
        for span in spans:
            report.add(span, recomputed, start + 1)

    async def _compare_some(self, spans: Sequence[Span], report: SampleReport) -> None:
        """Compare some tokens of the spans one by one, because engines do not apply the temperature to prompt
        logprobs."""
        positions = np.concatenate([np.arange(span.start, span.end) for span in spans])
        picked = np.unique(np.linspace(0, len(positions) - 1, min(ONE_BY_ONE, len(positions))).astype(int))
        if len(picked) < len(positions):
            report.excluded[NOT_ASKED] += len(positions) - len(picked)
        for position in map(int, positions[picked]):
            span = next(span for span in spans if span.start <= position < span.end)
            ids, token = report.tokens[:position], int(report.tokens[position])
            try:
                recomputed = await self._asker.recompute_next(
                    ids, token, span.temperature, span.adapter, span.version, _workers(spans)
                )
            except NotRecomputed as failure:
                report.add_failure(failure, 1)
                continue
            report.add(span._replace(start=position, end=position + 1), recomputed, position)


@dataclass
class SampleReport:
    """The results for the tokens of one line."""

    tokens: Tokens
    logprobs: Logprobs
    excluded: Counter[str]
    shown: list[dict[str, Any]] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def add(self, span: Span, recomputed: Recomputation, first: int) -> None:
        """Add a compared span; the first logprob in `recomputed` is of position `first`."""
        self.shown.append(
            {
                "turn": span.turn.number,
                "start": span.start,
                "end": span.end,
                "version": span.version,
                "worker": span.turn.worker,
                "recomputed_by": recomputed.worker,
                "recorded": self.logprobs[span.start : span.end],
                "recomputed": recomputed.logprobs[span.start - first : span.end - first],
            }
        )

    def add_failure(self, failure: NotRecomputed, tokens: int) -> None:
        """Count tokens for which no engine returned logprobs."""
        self.excluded[failure.reason] += tokens
        message = failure.message[:SHOWN_CHARS]
        if message and message not in self.refusals:
            self.refusals.append(message)


def _workers(spans: Sequence[Span]) -> set[str]:
    return {str(span.turn.worker) for span in spans}
