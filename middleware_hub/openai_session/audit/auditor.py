"""Asks engines for the logprobs of recorded tokens, under the weights that sampled them.

The requests go into the fleet as a layer's own: they wait at the gate and count as in flight, and no layer records
them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from middleware_hub.openai_session.audit.prompts import NotRendered, PromptCheck
from middleware_hub.openai_session.audit.spans import Span, comparable
from middleware_hub.openai_session.export.selection import trained_elsewhere
from middleware_hub.openai_session.sessions.tree import Session, Turn, line_trajectory
from miles_router.engines import paths, recomputing
from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.recomputing import RecomputationCut, Recomputed
from miles_router.middlewares import OK, Router
from miles_router.trajectory.pieces import Logprobs, Tokens

#: Requests of audits that a router has under way.
AT_ONCE = 2
#: Times that one is asked again which a pause has ended.
TRIES = 3
#: Tokens at the end of a context window that no prompt may have.
RESERVED = 8
#: Bytes of an answer: for each id, and beside them.
BYTES_PER_ID, BYTES_BESIDE = 256, 1 << 20
#: And those that are read while everybody waits; more of them are read beside.
READ_HERE = 1 << 18
#: Differences of prompts that an answer shows, and characters of what an engine says of a request that it refuses.
SHOWN, SHOWN_CHARS = 16, 500
JSON = [(b"content-type", b"application/json")]
REFUSED, CUT, UNREADABLE = "refused", "cut", "unreadable"


class NotRecomputed(Exception):
    """An engine did not say it; `reason` in a word, `said` in the engine's."""

    def __init__(self, reason: str, said: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.said = said


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
        self._prompts = prompts
        self._at_once = asyncio.Semaphore(AT_ONCE)

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
            await self._check_prompts([turn for turn in line if turn not in seen], prompts)
            seen.update(line)
        return {
            "session_id": session.id,
            "weight_version": now,
            "samples": samples,
            "prompts": prompts.as_json(),
        }

    async def _check_prompts(self, turns: Sequence[Turn], report: PromptReport) -> None:
        for turn in turns:
            try:
                difference = await self._prompts.difference(turn)
            except NotRendered as reason:
                report.not_compared[str(reason)] += 1
                continue
            report.compared += 1
            if difference is not None:
                report.differ += 1
                report.differences += [difference][: SHOWN - len(report.differences)]

    async def _sample(self, line: Sequence[Turn], elsewhere: Mapping[Turn, int], now: str | None) -> dict[str, Any]:
        found = comparable(line, elsewhere, now, await self._longest())
        others, shown, refusals = Counter(found.others), [], []
        trajectory = line_trajectory(line)
        tokens, logprobs = trajectory.tokens, trajectory.logprobs
        for adapter in dict.fromkeys(span.adapter for span in found.spans):
            spans = [span for span in found.spans if span.adapter == adapter]
            count = sum(span.end - span.start for span in spans)
            try:
                start, stop = spans[0].start - 1, spans[-1].end
                answered, worker = await self._recomputed(tokens[:stop], start, adapter, spans)
            except NotRecomputed as failure:
                others[failure.reason] += count
                refusals += [failure.said[:SHOWN_CHARS]] if failure.said else []
                continue
            if answered.version not in (None, now):  # they have changed meanwhile
                others["other_weights"] += count
                continue
            shown += [_shown(span, logprobs, answered.logprobs, start, worker) for span in spans]
        return {
            "leaf": line[-1].number,
            "tokens": len(trajectory),
            "compared": sum(each["end"] - each["start"] for each in shown),
            "spans": shown,
            "not_comparable": dict(others),
            "refusals": refusals,
        }

    async def _longest(self) -> int:
        """Tokens that every engine takes as a prompt."""
        known = [facts.context_length for facts in await self._router.fleet.all_facts()]
        windows = [length for length in known if length is not None]
        return max(0, min(windows) - RESERVED) if windows else 1 << 31

    def _preferred(self, spans: Sequence[Span]) -> str | None:
        """Another worker than those that sampled, the one with the fewest requests: one that has other weights than it
        says agrees with itself."""
        snapshot = self._router.pool.snapshot
        if snapshot.prefill:
            return None
        recorded = {span.turn.facts.get("worker") for span in spans}
        others = [unit for unit in snapshot.generating if unit.worker.url not in recorded]
        least = min(others, key=lambda unit: unit.in_flight, default=None)
        return None if least is None else str(least.worker.url)

    async def _recomputed(self, ids: Tokens, start: int, adapter: str, spans: Sequence[Span]) -> tuple[Recomputed, str]:
        """The logprobs of the ids behind `start`, and the worker that said them.

        Raises:
            NotRecomputed: no engine says them.
        """
        body, wanted = recomputing.request(ids, start, adapter), ids[start:].tolist()
        for _ in range(TRIES):
            async with self._at_once:
                status, answer, worker = await self._ask(body, BYTES_BESIDE + BYTES_PER_ID * len(wanted), spans)
            if status != OK:
                raise NotRecomputed(REFUSED, answer.decode("utf-8", "replace"))
            try:
                read = partial(recomputing.read, answer, wanted)
                found = await asyncio.to_thread(read) if len(answer) > READ_HERE else read()
            except RecomputationCut:
                continue
            except UnreadableAnswer as error:
                raise NotRecomputed(UNREADABLE, str(error)) from None
            if found.version is None:
                found = found._replace(version=self._router.pool.version_of(worker))
            return found, worker
        raise NotRecomputed(CUT)

    async def _ask(self, body: bytes, limit: int, spans: Sequence[Span]) -> tuple[int, bytes, str]:
        preferred = self._preferred(spans)
        async with self._router.forward(
            "POST", paths.GENERATE, headers=JSON, body=body, preferred=preferred
        ) as forwarded:
            return forwarded.reply.status, await forwarded.reply.read_all(limit), str(forwarded.worker.url)


def _shown(span: Span, recorded: Logprobs, recomputed: Logprobs, start: int, worker: str) -> dict[str, Any]:
    """One span of the answer. The first of `recomputed` is of the position behind `start`."""
    first = start + 1
    return {
        "turn": span.turn.number,
        "start": span.start,
        "end": span.end,
        "version": span.version,
        "worker": span.turn.facts.get("worker"),
        "recomputed_by": worker,
        "recorded": recorded[span.start : span.end],
        "recomputed": recomputed[span.start - first : span.end - first],
    }
