"""A simulated worker with the time and memory of a GPU: tokens arrive at the times of its schedule, and the prefix
cache is the schedule's tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from aiohttp import web

from miles_router.testing import SimulatedWorker
from miles_router.testing.worker.engine import Engine, Load, PauseMode, cache_key
from miles_router.testing.worker.model.generation import Generation, GenerationRequest, Model
from miles_router.testing.worker.simulated_worker import SGLANG_ROUTES, Routes
from miles_router.testing.worker.visit import Visit
from tests.support.simulated.costs.gpu import Gpu
from tests.support.simulated.costs.pacer import Pacer
from tests.support.simulated.costs.plan import planned
from tests.support.simulated.costs.prefix_tree import packed
from tests.support.simulated.costs.schedule import Job
from tests.support.simulated.extended import extended

#: Tokens between two events of a stream. SGLang's default `stream_interval` is 1, an event for each token.
STREAM_INTERVAL = 32


@dataclass(slots=True, kw_only=True)
class PacedRequest(GenerationRequest):
    """A request with SGLang's `custom_labels`, which may plan its output (`plan.py`)."""

    labels: dict[str, str] = field(default_factory=dict)


class PacedGeneration(Generation):
    """A generation that grows by many tokens at once."""

    def extend(self, count: int, version: str) -> None:
        """Call `step` up to `count` times. With a script and without logprobs, stop strings or abort, append all ids
        at once, which is faster."""
        script, done, sampling = self.request.script, len(self.output_ids), self.request.sampling
        looks_at_text = bool(self._stop_windows) or sampling.stop_regex is not None
        if script is None or self.request.return_logprob or looks_at_text or self._to_finish is not None:
            for _ in range(count):
                if self.finish_reason is None:
                    self.step(version)
            return
        known = script[done : min(done + count, self.max_new_tokens or 1)]
        end = next((n for n, token in enumerate(known, 1) if token in self._stop_ids), len(known))
        if known:
            self._take(known[:end], version)
            self._check_finish(known[end - 1])


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
        ids = planned(self.model, request, request.labels if isinstance(request, PacedRequest) else {})
        if request.sampling.max_new_tokens != 0:
            request.script = ids
        generation = PacedGeneration(self.model, request)
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
            assert isinstance(generation, PacedGeneration)
            generation.extend(job.made - len(generation.output_ids), self.weight_version)

    def _go_on_if_it_may(self) -> None:
        if not self.stopped and self.paused in (None, PauseMode.ABORT):
            self.pacer.go_on()


class PacedVisit(Visit):
    """A request to a paced worker."""

    def accept(self, samples: list[GenerationRequest], copies: int) -> list[GenerationRequest]:
        labels = self.json().get("custom_labels") if self.exchange.path == "/generate" else None
        return [extended(sample, PacedRequest, labels=labels) for sample in samples] if labels else samples


async def get_load(visit: Visit) -> web.StreamResponse:
    """Handle GET /get_load, SGLang's route before `/v1/loads`, which gateways of that time call."""
    load = visit.engine.load()
    counts = {"num_reqs": load.running + load.waiting, "num_waiting_reqs": load.waiting}
    return await visit.reply.json([{"dp_rank": 0, **counts, "num_tokens": load.used_tokens + load.waiting_tokens}])


class PacedWorker(SimulatedWorker):
    """A simulated worker that takes the time and memory of a GPU, with a single rank.

    Args:
        time_scale: how many simulated seconds pass in one second.
        options: those of `SimulatedWorker`.
    """

    routes: ClassVar[Routes] = {**SGLANG_ROUTES, ("GET", "/get_load"): get_load}
    visit_type = PacedVisit

    def __init__(self, gpu: Gpu, *, time_scale: float = 1.0, **options: Any) -> None:
        self._pacer = Pacer(gpu, time_scale)
        super().__init__(**options)

    def make_engine(self, model: Model, **options: Any) -> Engine:
        return PacedEngine(model, self._pacer, **options)
