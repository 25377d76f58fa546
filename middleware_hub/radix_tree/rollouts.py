"""Text rollouts as episodes of the dashboard: a generation, and the generations that go on from what it sampled.

A generation is a turn of one rollout. It lives as long as its entry in the cache; a rollout as long as it has turns, or
requests under way.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from middleware_hub.radix_tree.cache import RadixTreeCache
from middleware_hub.radix_tree.entry import Entry
from middleware_hub.radix_tree.recording import TokenizedText
from miles_router.errors import BadRequest
from miles_router.middlewares import (
    IDLE,
    RUNNING,
    WAITING,
    EpisodeLine,
    EpisodePlace,
    EpisodeRow,
    EpisodeShelf,
    EpisodeSource,
    EpisodeView,
    Exchange,
    Facets,
    GenerateRequest,
    Router,
    TokenCounts,
    TurnRow,
)
from miles_router.trajectory.rows import ROUTED_EXPERTS
from miles_router.trajectory.sample import BY_FINISH_REASON, ShapedRows

KIND = "text"
#: In front of an episode's name. No session has such a character.
NAMED = "text@"
#: Why a generation is not simply the next one: another one goes on from the same.
BRANCH = "branch"


class RequestFacts(NamedTuple):
    """Of a generation's request, as `TurnRow` names them."""

    cached_tokens: int | None = None
    worker: str | None = None
    request_id: str | None = None
    asked_at: float | None = None
    answered_at: float | None = None
    waited_s: float = 0.0


NOTHING_KNOWN = RequestFacts()


class TextTurn:
    """One generation. `kept`: how many tokens of the one before it its prompt begins with; `prompt`: tokens of all of
    its prompt."""

    __slots__ = ("before", "entry", "facts", "kept", "number", "prompt", "read", "reason", "rollout")

    def __init__(
        self, rollout: TextRollout, entry: Entry, before: TextTurn | None, kept: int, prompt: int, facts: RequestFacts
    ) -> None:
        self.rollout = rollout
        self.entry = entry
        self.before = before
        self.kept = kept
        self.prompt = prompt
        self.facts = facts
        self.number = rollout.count
        self.reason = BRANCH if any(each.before is before for each in rollout.turns.values()) and before else None
        self.read = False  # whether somebody has read a text that it is part of

    def line(self) -> list[TextTurn]:
        """The turns from the first one to this."""
        line = [self]
        while (before := line[-1].before) is not None:
            line.append(before)
        return line[::-1]

    def spans(self) -> list[dict[str, Any]]:
        """What it sampled, by the weights that did."""
        spans: list[dict[str, Any]] = []
        end = self.prompt
        for piece in self.entry.behind(self.prompt)[0].pieces:
            begin, end = end, end + len(piece)
            if spans and spans[-1]["version"] == piece.version:
                spans[-1]["end"] = end
            else:
                span = {"start": begin, "end": end, "version": piece.version, "worker": self.facts.worker}
                spans.append(span)
        return spans

    def sampled(self) -> Counter[str | None]:
        """How many tokens each version sampled in it."""
        tokens: Counter[str | None] = Counter()
        if self.prompt < self.entry.reused:  # some of them are those of another
            for span in self.spans():
                tokens[span["version"]] += span["end"] - span["start"]
            return tokens
        begin = self.prompt - self.entry.reused
        for end, is_sampled, version in self.entry.runs:
            if is_sampled and end > begin:
                tokens[version] += end - begin
            begin = max(begin, end)
        return tokens

    def row(self) -> TurnRow:
        """As it is shown."""
        return TurnRow(
            turn=self.number,
            parent=None if self.before is None else self.before.number,
            reason=self.reason,
            prompt_tokens=self.prompt,
            given_tokens=self.prompt - self.kept,
            dropped_tokens=0 if self.before is None else len(self.before.entry) - self.kept,
            start=self.prompt,
            end=len(self.entry),
            spans=self.spans(),
            finish_reason=self.entry.finish,
            rid=self.entry.rid,
            **self.facts._asdict(),
        )


class TextRollout:
    """One episode."""

    __slots__ = ("count", "flights", "group", "id", "model", "started_at", "turns", "used_at")

    def __init__(self, now: float, group: str | None = None, model: str | None = None) -> None:
        self.id = NAMED + secrets.token_hex(8)
        self.started_at = self.used_at = now
        self.group = group
        self.model = model
        self.turns: dict[int, TextTurn] = {}
        self.count = 0  # turns that it has had
        self.flights: list[Any] = []  # where the requests under way are

    @property
    def place(self) -> EpisodePlace:
        """Where it stands among all."""
        return self.started_at, self.id


class TextRollouts:
    """All that are in memory."""

    reasons: Collection[str] = (BRANCH,)

    def __init__(self, router: Router, cache: RadixTreeCache, now: Callable[[], float] = time.time) -> None:
        self._router = router
        self._cache = cache
        self._now = now
        self._shelf = EpisodeShelf[TextRollout]()
        self._by_id: dict[str, TextRollout] = {}
        self._turns: dict[Entry, TextTurn] = {}
        cache.when_evicted.append(self._evicted)
        cache.when_restored = self._restored

    # What happens to them

    @contextmanager
    def under_way(
        self, exchange: Exchange, request: GenerateRequest, prompts: Sequence[TokenizedText]
    ) -> Iterator[RunningRollouts]:
        """While this is entered, a request with these prompts is."""
        group, model = exchange.flight.group, request.body.get("lora_path")
        rollouts = []
        for generation in range(request.generations):
            before = self._turn_before(prompts[request.prompt_of(generation)])
            rollout = (
                before.rollout
                if before is not None
                else TextRollout(
                    self._now(),
                    None if group is None else group.decode("latin-1"),
                    model if isinstance(model, str) else None,
                )
            )
            self._begin(rollout)
            rollout.flights.append(exchange.flight)
            rollouts.append(rollout)
        try:
            yield RunningRollouts(self, rollouts, exchange, self._now())
        finally:
            for rollout in rollouts:
                rollout.flights.remove(exchange.flight)
                rollout.used_at = self._now()
                self._end(rollout)

    def recorded(self, rollout: TextRollout, prompt: TokenizedText, entry: Entry, facts: RequestFacts) -> None:
        """One more generation of it is held."""
        if entry.node is None:  # no longer
            return
        before = self._turn_before(prompt)
        kept = len(prompt.match.trajectory) if before is not None else 0
        turn = self._add(rollout, entry, before, kept, len(prompt.trajectory), facts)
        given, cached = turn.prompt - kept, facts.cached_tokens
        self._router.run.record(turn.sampled(), given=given, reused=kept, cached=cached, reason=turn.reason)

    def read(self, entry: Entry, tokens: int) -> None:
        """Somebody reads the first `tokens` tokens of a generation: a turn counts the first time that it is in them."""
        turn = self._turns.get(entry.part_at(tokens))
        trained: Counter[str | None] = Counter()
        while turn is not None:
            if not turn.read and tokens > turn.prompt:
                turn.read = True
                for span in turn.spans():
                    trained[span["version"]] += max(min(span["end"], tokens) - span["start"], 0)
            tokens, turn = min(tokens, turn.kept), turn.before
        if trained.total():
            self._router.run.train(trained)

    def _turn_before(self, prompt: TokenizedText) -> TextTurn | None:
        before = prompt.goes_on_from
        return None if before is None else self._turns.get(before)

    def _restored(self, entry: Entry) -> None:
        """One is in memory again. What it shares with another tells what it goes on from."""
        sampled = entry.sampled_before(entry.reused)
        before = self._turns.get(entry.parent) if entry.parent is not None and sampled else None
        rollout = before.rollout if before is not None else TextRollout(self._now())
        self._begin(rollout)
        self._add(
            rollout, entry, before, entry.reused if before is not None else 0, entry.first_sampled(), NOTHING_KNOWN
        )

    def _begin(self, rollout: TextRollout) -> None:
        if rollout.id not in self._by_id:
            self._by_id[rollout.id] = rollout
            self._shelf.add(rollout.place, rollout)

    def _add(
        self,
        rollout: TextRollout,
        entry: Entry,
        before: TextTurn | None,
        kept: int,
        prompt: int,
        facts: RequestFacts,
    ) -> TextTurn:
        turn = self._turns[entry] = TextTurn(rollout, entry, before, kept, prompt, facts)
        rollout.turns[turn.number] = turn
        rollout.count += 1
        return turn

    def _evicted(self, entry: Entry) -> None:
        turn = self._turns.pop(entry, None)
        if turn is not None:
            del turn.rollout.turns[turn.number]
            for each in turn.rollout.turns.values():
                if each.before is turn:  # it would keep what was evicted
                    each.before = None
            self._end(turn.rollout)

    def _end(self, rollout: TextRollout) -> None:
        """It goes with its last turn and request."""
        if not rollout.turns and not rollout.flights and self._by_id.pop(rollout.id, None) is not None:
            self._shelf.remove(rollout.place)

    # As a source of episodes

    def newest(self, before: EpisodePlace | None, most: int) -> Sequence[EpisodeView]:
        """As of `EpisodeSource`."""
        return [RolloutView(rollout, self._router) for rollout in self._shelf.newest(before, most)]

    async def find(self, episode_id: str) -> EpisodeView | None:
        """As of `EpisodeSource`."""
        rollout = self._by_id.get(episode_id)
        return None if rollout is None else RolloutView(rollout, self._router)


class RunningRollouts:
    """Those of one request, by its generations."""

    def __init__(
        self, rollouts: TextRollouts, each: Sequence[TextRollout], exchange: Exchange, asked_at: float
    ) -> None:
        self._rollouts = rollouts
        self._each = each
        self._exchange = exchange
        self._asked_at = asked_at

    def recorded(self, generation: int, prompt: TokenizedText, entry: Entry, meta: Mapping[str, Any]) -> None:
        """A generation is held; `meta`: what the engine says of it."""
        flight, cached = self._exchange.flight, meta.get("cached_tokens")
        facts = RequestFacts(
            cached_tokens=cached if type(cached) is int else None,
            worker=flight.worker_url,
            request_id=self._exchange.request_id,
            asked_at=self._asked_at,
            answered_at=time.time(),
            waited_s=round(flight.waited, 6),
        )
        self._rollouts.recorded(self._each[generation], prompt, entry, facts)


class RolloutView:
    """One rollout, for the dashboard."""

    def __init__(self, rollout: TextRollout, router: Router) -> None:
        self._rollout = rollout
        self._router = router

    @property
    def place(self) -> EpisodePlace:
        """Where it stands."""
        return self._rollout.place

    def facets(self) -> Facets:
        """What filters look at."""
        turns = self._rollout.turns.values()
        reasons = {turn.reason for turn in turns if turn.reason is not None}
        return Facets(self._state(), self._rollout.group, reasons, self._workers())

    def row(self) -> EpisodeRow:
        """Its row."""
        rollout = self._rollout
        turns = [*rollout.turns.values()]
        continued = self._continued()
        ends = {turn: continued.get(turn.number, len(turn.entry)) for turn in turns}
        versions = dict.fromkeys(span["version"] for turn in turns for span in turn.spans())
        return EpisodeRow(
            id=rollout.id,
            state=self._state(),
            group=rollout.group,
            label=None,
            model=rollout.model,
            turns=len(turns),
            under_way=len(rollout.flights),
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
        """What stands beside its turns."""
        return {"metadata": None, "contract": None, "untraced": 0}

    def turns(self) -> Iterator[TurnRow]:
        """Those that there are now."""
        return (turn.row() for turn in list(self._rollout.turns.values()))

    def line(self, leaf: int | None) -> EpisodeLine:
        """The tokens up to a turn. As of `EpisodeView`."""
        turns = self._rollout.turns
        leaf = next(reversed(turns), None) if leaf is None else leaf  # nothing goes on from the newest turn
        if leaf is None or leaf not in turns:
            raise BadRequest(f"leaf must be the number of a turn that is held; there are {len(turns)}")
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

    def _continued(self) -> dict[int, int]:
        """The turns that others go on from, and how many of their tokens some of these have."""
        ends: dict[int, int] = {}
        for turn in self._rollout.turns.values():
            if turn.before is not None:
                ends[turn.before.number] = max(ends.get(turn.before.number, 0), turn.kept)
        return ends

    def _workers(self) -> list[str]:
        workers = (turn.facts.worker for turn in self._rollout.turns.values())
        return [*dict.fromkeys(worker for worker in workers if worker is not None)]

    def _state(self) -> str:
        flights = self._rollout.flights
        if not flights:
            return IDLE
        return WAITING if all(flight.waits for flight in flights) else RUNNING


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


_source: type[EpisodeSource] = TextRollouts
