"""An engine whose tokens arrive at the times of a GPU's schedule, and whose prefix cache is the schedule's tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from miles_router.testing.worker.costs.pacer import Pacer
from miles_router.testing.worker.costs.plan import planned
from miles_router.testing.worker.costs.prefix_tree import packed
from miles_router.testing.worker.costs.schedule import Job
from miles_router.testing.worker.engine import Engine, Load, PauseMode, cache_key
from miles_router.testing.worker.model.generation import Generation, GenerationRequest, Model

#: Tokens between two events of a stream. SGLang's default `stream_interval` is 1, an event for each token.
STREAM_INTERVAL = 32


class PacedEngine(Engine):
    """An `Engine` that takes the time and memory of a GPU.

    It computes all output ids when a generation begins, and appends them at its end, or for a stream every few tokens.
    """

    def __init__(self, model: Model, pacer: Pacer, **options: Any) -> None:
        self.pacer = pacer
        self.running: dict[str, Generation] = {}
        self._jobs: dict[str, Job] = {}
        super().__init__(model, **options)

    def begin(self, request: GenerationRequest) -> Generation:
        """Queue a generation and return it.

        Raises:
            ValueError: it needs more memory than the GPU has.
        """
        self._take_script(request)
        ids = planned(self.model, request)
        if request.sampling.max_new_tokens != 0:
            request.script = ids
        generation = Generation(self.model, request)
        interval = STREAM_INTERVAL if request.stream else 0
        job = Job(packed([*request.input_ids, *ids]), len(request.input_ids), generation.max_new_tokens, interval)
        job.key = cache_key(generation)
        self.pacer.enter(job)
        self._jobs[request.rid] = job
        self.running[request.rid] = generation
        self.pulse()
        return generation

    def pause(self, mode: PauseMode) -> None:
        self.catch_up()
        if mode is not PauseMode.ABORT:
            self.pacer.stand_still(retract=mode is PauseMode.RETRACT)
        super().pause(mode)

    def resume(self) -> None:
        super().resume()
        self._go_on_if_it_may()

    def stop(self) -> None:
        self.pacer.stand_still(retract=False)
        super().stop()

    def go_on(self) -> None:
        super().go_on()
        self._go_on_if_it_may()

    def catch_up(self) -> None:
        self.pacer.catch_up()
        for generation in self.running.values():
            self._extend(generation)

    def load(self, rank: int = 0) -> Load:
        """Return the load of the schedule, which has a single rank; seconds are in simulated time.

        `waiting_uncached_tokens` is estimated from the cache hit rate, as in SGLang.
        """
        self.pacer.catch_up()
        schedule, counts = self.pacer.schedule, self.pacer.schedule.counts
        waiting = sum(job.tokens for job in schedule.waiting)
        hits = counts.cached_tokens / counts.prompt_tokens if counts.prompt_tokens else 0.0
        return Load(
            schedule.gpu.kv_tokens,
            running=schedule.running,
            waiting=len(schedule.waiting),
            used_tokens=schedule.used,
            waiting_tokens=waiting,
            waiting_uncached_tokens=int(waiting * (1 - hits)) + schedule.unprefilled,
            max_running=schedule.gpu.max_running,
            tokens_per_second=schedule.tokens_per_second,
            cache_hit_rate=hits,
            prefilled_tokens=counts.prompt_tokens - counts.cached_tokens,
            prefill_seconds=counts.prefill_seconds,
        )

    def flush(self) -> None:
        self.pacer.schedule.tree.clear()

    def can_flush(self) -> bool:
        return self.pacer.schedule.used == 0

    def _leave_in_cache(self, generation: Generation) -> None:
        self.pacer.leave(self._jobs.pop(generation.request.rid))

    def _abort_where(self, chosen: Callable[[Generation], bool]) -> None:
        self.catch_up()
        super()._abort_where(chosen)
        for job in self._jobs.values():
            self.pacer.wake(job)

    async def _grow(self, generation: Generation) -> None:
        await self.pacer.news(self._jobs[generation.request.rid])
        await self.thaw(generation)
        self._extend(generation)
        if generation.aborted:
            generation.step(self.weight_version)

    def _extend(self, generation: Generation) -> None:
        """Append the ids that the schedule has produced by now."""
        job = self._jobs[generation.request.rid]
        generation.cached_tokens = job.cached or 0
        generation.retractions, generation.waiting = job.retractions, job.waiting
        if generation.finish_reason is None:
            generation.extend(job.made - len(generation.output_ids), self.weight_version)

    def _go_on_if_it_may(self) -> None:
        if not self.stopped and self.paused in (None, PauseMode.ABORT):
            self.pacer.go_on()
