"""A text rollout as an episode of the dashboard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from middleware_hub.radix_tree.dashboard.turns import TextRollout, TextTurn
from middleware_hub.radix_tree.entry import Entry
from miles_router.errors import BadRequest
from miles_router.middlewares import Router
from miles_router.middlewares.episodes import (
    IDLE,
    RUNNING,
    WAITING,
    EpisodeLine,
    EpisodePlace,
    EpisodeRow,
    EpisodeView,
    Facets,
    TokenCounts,
    TurnRow,
)
from miles_router.trajectory.rows import ROUTED_EXPERTS
from miles_router.trajectory.sample import BY_FINISH_REASON, ShapedRows


class RolloutView:
    """The dashboard's view of one rollout."""

    def __init__(self, rollout: TextRollout, router: Router) -> None:
        self._rollout = rollout
        self._router = router

    @property
    def place(self) -> EpisodePlace:
        return self._rollout.place

    def facets(self) -> Facets:
        """Return the fields by which the dashboard filters."""
        turns = self._rollout.turns.values()
        reasons = {turn.reason for turn in turns if turn.reason is not None}
        return Facets(self._state(), self._rollout.group, reasons, self._workers())

    def row(self) -> EpisodeRow:
        rollout = self._rollout
        turns = [*rollout.turns.values()]
        continued = rollout.continued()
        ends = {turn: continued.get(turn.number, len(turn.entry)) for turn in turns}
        versions = dict.fromkeys(span["version"] for turn in turns for span in turn.spans())
        return EpisodeRow(
            id=rollout.id,
            state=self._state(),
            group=rollout.group,
            label=None,
            model=rollout.model,
            turns=len(turns),
            under_way=len(rollout.routings),
            segments=sum(turn.before is None for turn in turns),
            leaves=len(turns) - len(continued),
            reasons=dict(Counter(turn.reason for turn in turns if turn.reason is not None)),
            tokens=TokenCounts(
                all=sum(len(turn.entry) - turn.kept for turn in turns),
                sampled=sum(len(turn.entry) - turn.prompt for turn in turns),
                trained=sum(max(end - turn.prompt, 0) for turn, end in ends.items()),
            ),
            finish_reason=turns[-1].entry.finish if turns else None,
            end_reason=None,
            weight_versions=[version for version in versions if version is not None],
            workers=self._workers(),
            started_at=rollout.started_at,
            last_used_at=rollout.used_at,
            waited_s=round(sum(turn.facts.waited_s for turn in turns), 6),
        )

    def about(self) -> Mapping[str, Any]:
        """Return the fields shown next to the turns; text rollouts have no values for them."""
        return {"metadata": None, "contract": None, "untraced": 0}

    def turns(self) -> Iterator[TurnRow]:
        return (turn.row() for turn in list(self._rollout.turns.values()))

    def line(self, leaf: int | None) -> EpisodeLine:
        """Return the tokens up to a turn, by default the newest.

        Raises:
            BadRequest: no turn in memory has this number.
        """
        turns = self._rollout.turns
        leaf = next(reversed(turns), None) if leaf is None else leaf  # the newest turn has no continuation
        if leaf is None or leaf not in turns:
            raise BadRequest(f"leaf must be the number of a turn in memory; the rollout has {len(turns)} turns")
        last = turns[leaf]
        line, trajectory = last.line(), last.entry.trajectory()
        ends = [*(turn.kept for turn in line[1:]), len(last.entry)]
        return EpisodeLine(
            leaf=leaf,
            trajectory=trajectory,
            loss_mask=lambda: trajectory.loss_mask,
            turns=[_turn_span(turn, end) for turn, end in zip(line, ends, strict=True)],
            response_length=len(trajectory) - line[0].prompt,
            status=BY_FINISH_REASON.get(last.entry.finish, "completed"),
            experts=partial(self._experts, last.entry),
        )

    def _experts(self, entry: Entry, start: int, stop: int) -> ShapedRows | None:
        channel, held = self._router.rows[ROUTED_EXPERTS], entry.held_rows(ROUTED_EXPERTS, len(entry))
        if held is None or channel.shape is None or held.count < stop:
            return None
        return channel.array(held.rows, start, stop)

    def _workers(self) -> list[str]:
        workers = (turn.facts.worker for turn in self._rollout.turns.values())
        return [*dict.fromkeys(worker for worker in workers if worker is not None)]

    def _state(self) -> str:
        routings = self._rollout.routings
        if not routings:
            return IDLE
        return WAITING if all(routing.waits for routing in routings) else RUNNING


def _turn_span(turn: TextTurn, end: int) -> dict[str, Any]:
    facts = turn.facts
    return {
        "turn": turn.number,
        "start": turn.prompt,
        "end": max(end, turn.prompt),
        "finish_reason": turn.entry.finish,
        "reason": turn.reason,
        "edit": None,
        "cached_tokens": facts.cached_tokens,
        "asked_at": facts.asked_at,
        "first_token_at": None,
        "answered_at": facts.answered_at,
        "worker": facts.worker,
        "rid": turn.entry.rid,
    }


_view: type[EpisodeView] = RolloutView
