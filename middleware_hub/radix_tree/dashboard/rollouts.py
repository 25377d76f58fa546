"""Text rollouts as episodes of the dashboard. A generation is a turn while its entry is in the cache; a rollout exists
while it has turns or requests in flight.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from middleware_hub.radix_tree.cache import RadixTreeCache
from middleware_hub.radix_tree.dashboard.turns import BRANCH, NOTHING_KNOWN, RequestFacts, TextRollout, TextTurn
from middleware_hub.radix_tree.dashboard.views import RolloutView
from middleware_hub.radix_tree.entry import Entry
from middleware_hub.radix_tree.recording import TokenizedText
from miles_router.middlewares import Exchange, GenerateRequest, Router
from miles_router.middlewares.episodes import EpisodePlace, EpisodeShelf, EpisodeSource, EpisodeView
from miles_router.trajectory import Retrieved

KIND = "text"


class TextRollouts:
    """The text rollouts in memory."""

    reasons: Collection[str] = (BRANCH,)

    def __init__(self, router: Router, cache: RadixTreeCache) -> None:
        self._router = router
        self._cache = cache
        self._shelf = EpisodeShelf[TextRollout]()
        self._by_id: dict[str, TextRollout] = {}
        self._turns: dict[Entry, TextTurn] = {}
        cache.when_evicted.append(self._evicted)
        cache.when_restored = self._restored

    # Events

    @contextmanager
    def track(
        self, exchange: Exchange, request: GenerateRequest, prompts: Sequence[TokenizedText]
    ) -> Iterator[RunningRollouts]:
        """Yield the rollouts of a request's generations; inside this context the request counts as in flight."""
        group, model = exchange.routing.group, request.body.get("lora_path")
        rollouts = []
        for generation in range(request.generations):
            before, _ = self._turn_before(prompts[request.prompt_of(generation)])
            rollout = (
                before.rollout
                if before is not None
                else TextRollout(
                    time.time(),
                    None if group is None else group.decode("latin-1"),
                    model if isinstance(model, str) else None,
                )
            )
            self._ensure_listed(rollout)
            rollout.routings.append(exchange.routing)
            rollouts.append(rollout)
        try:
            yield RunningRollouts(self, rollouts, exchange, time.time())
        finally:
            for rollout in rollouts:
                rollout.routings.remove(exchange.routing)
                rollout.used_at = time.time()
                self._remove_if_over(rollout)

    def record_turn(self, rollout: TextRollout, prompt: TokenizedText, entry: Entry, facts: RequestFacts) -> None:
        """Add a recorded generation to its rollout, and count its tokens for the run."""
        if entry.node is None:  # already evicted
            return
        before, kept = self._turn_before(prompt)
        turn = self._add(rollout, entry, before, kept, len(prompt.trajectory), facts)
        reused = len(prompt.match.trajectory) if before is not None else 0
        given, cached = turn.prompt - reused, facts.cached_tokens
        self._router.run.record(turn.sampled(), given=given, reused=reused, cached=cached, reason=turn.reason)

    def count_trained(self, entry: Entry, tokens: int) -> None:
        """Count the first `tokens` tokens of a generation as trained, each sampled token once.

        Equal siblings share the recorded turns that they continue. The first read of each sibling counts another of
        those equal turns.
        """
        turn, tokens = _sampled_within(self._turns.get(entry), tokens)
        first_reading = turn is not None and turn.read < tokens
        trained: Counter[str | None] = Counter()
        while turn is not None:
            if tokens > turn.read or first_reading:
                trained += self._uncounted_turn(turn, tokens).count_read(tokens)
            turn, tokens = _sampled_within(turn.before, min(tokens, turn.kept))
        if trained.total():
            self._router.run.train(trained)

    def record_rewards(self, found: Iterable[Retrieved], rewards: Iterable[object]) -> None:
        """Count a reward for each text (None: unknown), under the weight version that sampled the text's end."""
        for each, reward in zip(found, rewards, strict=False):
            if reward is not None:
                spans = each.trajectory.weight_versions
                self._router.run.reward(spans[-1].version if spans else None, reward)

    def _uncounted_turn(self, turn: TextTurn, tokens: int) -> TextTurn:
        """Return this turn, or if its first `tokens` tokens are counted, an equal turn where they are not."""
        node = turn.entry.node
        if turn.read < tokens or node is None:
            return turn
        equal = (self._turns.get(entry) for entry in reversed(node.entries))
        unread = (each for each in equal if each is not None and each.read < tokens)
        return next((each for each in unread if each.agrees_with(turn, tokens)), turn)

    def _turn_before(self, prompt: TokenizedText) -> tuple[TextTurn | None, int]:
        """Return the turn that a prompt continues, and how many of the turn's tokens the prompt keeps."""
        if prompt.continued_entry is None or prompt.match.entry is None:
            return None, 0
        turn, kept = _sampled_within(self._turns.get(prompt.match.entry), len(prompt.match.trajectory))
        return turn, kept if turn is not None else 0

    def _restored(self, entry: Entry) -> None:
        """Add the turn of a restored generation. Its shared tokens determine which turn it continues."""
        prompt = entry.prompt_length()
        shared = entry.end_of_sampled(prompt)
        before, kept = _sampled_within(self._turns.get(entry.entry_at(shared)) if shared else None, shared)
        rollout = before.rollout if before is not None else TextRollout(time.time())
        self._ensure_listed(rollout)
        facts = NOTHING_KNOWN._replace(worker=entry.worker)
        self._add(rollout, entry, before, kept if before is not None else 0, prompt, facts)

    def _ensure_listed(self, rollout: TextRollout) -> None:
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
            for each in turn.after:  # a reference would keep the evicted turn alive
                each.before = None
            turn.after.clear()
            if turn.before is not None:
                turn.before.after.pop(turn, None)
            self._remove_if_over(turn.rollout)

    def _remove_if_over(self, rollout: TextRollout) -> None:
        """Remove a rollout that has no turns and no requests in flight."""
        if not rollout.turns and not rollout.routings and self._by_id.pop(rollout.id, None) is not None:
            self._shelf.remove(rollout.place)

    def __iter__(self) -> Iterator[TextRollout]:
        return iter(tuple(self._by_id.values()))

    def get(self, rollout_id: str) -> TextRollout | None:
        return self._by_id.get(rollout_id)

    # The episode source

    async def newest(self, before: EpisodePlace | None, most: int) -> Sequence[EpisodeView]:
        """Return at most `most` episodes that began before `before`, the newest first."""
        return [RolloutView(rollout, self._router) for rollout in self._shelf.newest(before, most)]

    async def find(self, episode_id: str) -> EpisodeView | None:
        rollout = self.get(episode_id)
        return None if rollout is None else RolloutView(rollout, self._router)


class RunningRollouts:
    """The rollouts of one request, by generation."""

    def __init__(
        self, rollouts: TextRollouts, each: Sequence[TextRollout], exchange: Exchange, asked_at: float
    ) -> None:
        self._rollouts = rollouts
        self._each = each
        self._exchange = exchange
        self._asked_at = asked_at

    def record_turn(self, generation: int, prompt: TokenizedText, entry: Entry, meta: Mapping[str, Any]) -> None:
        """Add a recorded generation to its rollout; `meta` is the engine's `meta_info`."""
        routing, cached = self._exchange.routing, meta.get("cached_tokens")
        facts = RequestFacts(
            cached_tokens=cached if type(cached) is int else None,
            worker=routing.worker_url,
            request_id=self._exchange.request_id,
            asked_at=self._asked_at,
            answered_at=time.time(),
            waited_s=round(routing.waited, 6),
        )
        self._rollouts.record_turn(self._each[generation], prompt, entry, facts)


def _sampled_within(turn: TextTurn | None, tokens: int) -> tuple[TextTurn | None, int]:
    """Return the last turn up to this one that sampled one of the first `tokens` tokens, and how many of these tokens
    it has, including its prompt."""
    while turn is not None and tokens <= turn.prompt:
        tokens, turn = min(tokens, turn.kept), turn.before
    return turn, tokens


_source: type[EpisodeSource] = TextRollouts
