"""The simulated engine: running generations, and the effects of pause, abort and weight updates. No HTTP."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from miles_router.testing.worker.model.generation import (
    Generation,
    GenerationRequest,
    Model,
    sequence_of,
)
from miles_router.testing.worker.model.prefix_cache import PrefixCache
from miles_router.testing.worker.model.sampling import context_hash, key_of, mix

# Without simulated latency, this many tokens are sampled before other tasks run.
_BURST = 32
_MAX_REMEMBERED_PROMPTS = 65536
# So long after a stream's end, SGLang 0.5.23 aborts all generations with its rid.
_STREAM_ABORT_S = 2.0


class PauseMode(str, Enum):
    """The modes of `/pause_generation`, which differ in what happens to running generations."""

    ABORT = "abort"
    RETRACT = "retract"
    IN_PLACE = "in_place"


@dataclass(frozen=True, slots=True)
class Load:
    """The load that an engine reports in `/v1/loads`."""

    capacity: int
    running: int = 0
    waiting: int = 0
    used_tokens: int = 0
    waiting_tokens: int = 0
    waiting_uncached_tokens: int = 0
    max_running: int = 256
    tokens_per_second: float = 0.0
    cache_hit_rate: float = 0.0
    prefilled_tokens: int = 0
    prefill_seconds: float = 0.0


class Engine:
    """An engine that runs generations one token at a time, each in its caller's task.

    It sleeps `token_latency_s` before every token; the attribute may be changed at any time.
    """

    def __init__(
        self,
        model: Model,
        *,
        weight_version: str = "default",
        token_latency_s: float = 0.0,
        replica: int = 0,
        enable_lora: bool = False,
        dp_size: int = 1,
    ) -> None:
        self.model = model
        self.dp_size = dp_size
        self.weight_version = weight_version
        self.token_latency_s = token_latency_s
        self.enable_lora = enable_lora
        self.paused: PauseMode | None = None
        self.running: dict[str, Generation] = {}
        self.held = 0
        self.slow_down_s = 0.0
        self.updating = False
        self.healthy = True
        self.stopped = False
        self.adapters: dict[str, str] = {}
        self.cache = PrefixCache()
        self.scripts: deque[list[int]] = deque()
        """Output ids of the next generations, in order, each used instead of sampling."""
        self._rests: dict[int, list[int]] = {}
        self._known_rids: set[str] = set()
        self._left_streams: list[list[str]] = []
        self._ended_streams: list[list[str]] = []
        self._replica = mix(replica)
        self._repeats: OrderedDict[int, int] = OrderedDict()
        self._changed = asyncio.Event()
        self._next_rank = 0

    @property
    def weight_version(self) -> str:
        """The version of the weights that sample."""
        return self._weight_version

    @weight_version.setter
    def weight_version(self, version: str) -> None:
        self.catch_up()
        self._weight_version = version
        self.named_version = version
        """The version in `/model_info`. SGLang still reports the old one after an update that failed half way."""

    def noise_for(self, rid: str | None, input_ids: list[int]) -> int:
        """Return the seed that distinguishes samples of one prompt: from the rid, or without one from a counter."""
        if rid is not None:
            return key_of(rid)
        prompt = context_hash(input_ids)
        repeat = self._repeats.pop(prompt, 0)
        self._repeats[prompt] = repeat + 1
        if len(self._repeats) > _MAX_REMEMBERED_PROMPTS:
            self._repeats.popitem(last=False)
        return mix(self._replica + repeat)

    def reserve(self, rids: list[str]) -> None:
        """Mark the rids of a request as in use.

        Raises:
            ValueError: a rid is in use already.
        """
        for rid in rids:
            if rid in self._known_rids:
                raise ValueError(f"Duplicate request ID detected: {rid}")
        self._known_rids.update(rids)

    def unreserve(self, rids: list[str]) -> None:
        self._known_rids.difference_update(rids)

    def end_stream(self, rids: list[str]) -> None:
        """After a stream's end, wait `_STREAM_ABORT_S` and then abort all generations with its rids, including those of
        later requests (SGLang 0.5.23, `TokenizerManager.create_abort_task`)."""
        self._ended_streams.append(rids)
        asyncio.get_running_loop().call_later(_STREAM_ABORT_S, self._abort_ended, rids)

    def abort_ended_streams(self) -> None:
        """Do the pending aborts of ended streams now."""
        for rids in list(self._ended_streams):
            self._abort_ended(rids)

    def _abort_ended(self, rids: list[str]) -> None:
        for index, each in enumerate(self._ended_streams):
            if each is rids:
                del self._ended_streams[index]
                for rid in rids:
                    self.abort(rid)
                return

    async def admission(self) -> None:
        """Wait while the worker is paused. Aborts do not affect waiting requests, as in SGLang."""
        if self.paused is None:
            return
        self.held += 1
        try:
            await self.until(lambda: self.paused is None)
        finally:
            self.held -= 1

    def make_generation(self, request: GenerationRequest) -> Generation:
        """Return a generation that has not begun."""
        return Generation(self.model, request)

    def begin(self, request: GenerationRequest) -> Generation:
        """Start a generation and return it. The caller must `end()` it."""
        self._take_script(request)
        generation = self.make_generation(request)
        generation.dp_rank = self._rank(request)
        key = cache_key(generation)
        generation.cached_tokens = self._cached_tokens(request, key)
        self.cache.insert(request.input_ids, key)
        self.running[request.rid] = generation
        self.pulse()
        return generation

    def end(self, generation: Generation) -> None:
        """Remove a generation, finished or not, from the running ones.

        If it ended before its script did, the rest of the script goes to the next request whose prompt continues it.
        """
        self.running.pop(generation.request.rid, None)
        script, written = generation.request.script, len(generation.output_ids)
        if script is not None and written < len(script):
            self._rests[context_hash(sequence_of(generation))] = script[written:]
        self._leave_in_cache(generation)
        self.pulse()

    async def outputs(self, generation: Generation) -> AsyncIterator[None]:
        """Run a generation to its end. Yield when there is output to send: at every token of a stream, else at the
        end."""
        while generation.finish_reason is None:
            await self._grow(generation)
            due = generation.request.stream or generation.finish_reason is not None
            if due and generation.flush():
                yield

    def abort(self, rid: str) -> None:
        """Abort running generations whose rid begins with `rid`, as SGLang does. Ignore a rid that is not in use."""
        if rid and rid in self._known_rids:
            self._abort_where(lambda generation: generation.request.rid.startswith(rid))

    def client_left(self, rids: list[str], *, stream: bool) -> None:
        """Handle a client's disconnection as SGLang 0.5.23 does: abort all generations whose rid begins with one of
        these, including other requests'. For a stream this happens `_STREAM_ABORT_S` later."""
        if stream:
            self._left_streams.append(rids)
            asyncio.get_running_loop().call_later(_STREAM_ABORT_S, self.abort_left_streams)
        else:
            self._abort_beginning(rids)

    def abort_left_streams(self) -> None:
        """Do the pending aborts of streams whose clients have left now."""
        while self._left_streams:
            self._abort_beginning(self._left_streams.pop(0))

    def _abort_beginning(self, rids: list[str]) -> None:
        names = tuple(filter(None, rids))
        self._abort_where(lambda generation: generation.request.rid.startswith(names))

    def abort_all(self) -> None:
        self._abort_where(lambda generation: True)

    def pause(self, mode: PauseMode) -> None:
        """Make new requests wait, and abort running ones or freeze them until `resume()`, depending on the mode."""
        self.paused = mode
        if mode is PauseMode.ABORT:
            self.abort_all()
        if mode is PauseMode.RETRACT:
            for generation in self.running.values():
                generation.waiting = True
                generation.retractions += 1
        self.pulse()

    def resume(self) -> None:
        self.paused = None
        for generation in self.running.values():
            generation.waiting = False
        self.pulse()

    def stop(self) -> None:
        """Halt the scheduler, as if its process were stopped. Requests that do not need it are still answered."""
        self.stopped = True

    def go_on(self) -> None:
        """Continue after `stop()`."""
        self.stopped = False
        self.pulse()

    async def turn(self) -> None:
        """Wait until the scheduler is not stopped. A paused scheduler is not stopped."""
        await self.until(lambda: not self.stopped)

    def load(self, rank: int = 0) -> Load:
        """Return the load of a rank. Retracted requests count as running: SGLang publishes no new load while paused."""
        running = [each for each in self.running.values() if each.dp_rank in (None, rank)]
        used = sum(generation.prompt_tokens + len(generation.output_ids) for generation in running)
        return Load(self.model.context_len, running=len(running), used_tokens=used)

    def catch_up(self) -> None:
        """Produce the tokens that are due by now. A no-op here: each generation's task does it."""

    def flush(self) -> None:
        """Empty the prefix cache."""
        self.cache.clear()

    async def idle(self) -> None:
        """Wait until nothing runs."""
        await self.until(lambda: not self.running)

    async def generates_before(self, deadline: float) -> bool:
        """Wait until the engine can generate. Return False if it cannot before `deadline`, in the loop's time."""
        remaining = deadline - asyncio.get_running_loop().time()
        try:
            await asyncio.wait_for(self.until(self.generates), max(0.0, remaining))
        except asyncio.TimeoutError:
            return False
        return True

    def can_flush(self) -> bool:
        """Return True if no generation occupies cache memory; retracted ones do not."""
        return all(generation.waiting for generation in self.running.values())

    def _rank(self, request: GenerationRequest) -> int | None:
        """Return the rank that a request is pinned to, else the next one round-robin; None with a single rank."""
        if self.dp_size == 1:
            return None
        if request.routed_dp_rank is not None:
            return request.routed_dp_rank
        rank, self._next_rank = self._next_rank, (self._next_rank + 1) % self.dp_size
        return rank

    def _take_script(self, request: GenerationRequest) -> None:
        """Set the request's script: the rest of a script that its prompt continues, else the next planned one."""
        rest = self._rests.pop(context_hash(request.input_ids), None) if self._rests else None
        if rest is not None:
            request.script = rest
        elif self.scripts:
            request.script = self.scripts.popleft()

    def _leave_in_cache(self, generation: Generation) -> None:
        # The last id was sampled but never fed back, so its keys and values do not exist.
        self.cache.insert(sequence_of(generation)[:-1], cache_key(generation))

    def _cached_tokens(self, request: GenerationRequest, key: str) -> int:
        """Return how many prompt tokens come from the cache. Positions whose logprobs are requested are recomputed."""
        matched = self.cache.match(request.input_ids, key)
        if request.return_logprob and request.logprob_start_len >= 0:
            return min(matched, request.logprob_start_len)
        return matched

    def _abort_where(self, chosen: Callable[[Generation], bool]) -> None:
        for generation in self.running.values():
            if chosen(generation):
                if generation.waiting:
                    generation.abort_waiting()
                else:
                    generation.abort()
        self.pulse()

    async def _grow(self, generation: Generation) -> None:
        """Sample one token for a stream or with latency, else up to `_BURST` tokens."""
        await self.thaw(generation)
        steps = 1 if generation.request.stream or self.token_latency_s or self.slow_down_s else _BURST
        await asyncio.sleep(self.token_latency_s + self.slow_down_s)
        await self.thaw(generation)
        for _ in range(steps):
            if generation.finish_reason is not None:
                return
            generation.step(self.weight_version)
            if generation.due_for_forced_output():
                generation.flush()

    def generates(self) -> bool:
        """Return True if the engine is neither paused nor stopped."""
        return self.paused is None and not self.stopped

    async def thaw(self, generation: Generation) -> None:
        """Wait while the engine is stopped or has frozen this generation by a pause."""
        await self.turn()
        if self.paused in (PauseMode.RETRACT, PauseMode.IN_PLACE):
            await self.until(lambda: self.paused is None or generation.finish_reason is not None)

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait until the condition is true. It is evaluated after every `pulse`."""
        while not condition():
            await self._changed.wait()

    def pulse(self) -> None:
        """Wake all tasks in `until`, which evaluate their conditions again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def cache_key(generation: Generation) -> str:
    """Return the cache key of a generation: only equal keys share prefixes. Each rank and each adapter has its own."""
    request, rank = generation.request, generation.dp_rank
    parts = [request.extra_key or "", *(str(each) for each in (rank, request.lora_path) if each is not None)]
    return "\n".join(parts)
