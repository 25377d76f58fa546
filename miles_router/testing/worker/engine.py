"""The simulated engine: which generations run, what pause, abort and weight updates do to them. No HTTP."""

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

# With no simulated latency, this many tokens are sampled before other requests get their turn.
_BURST = 32
_MAX_REMEMBERED_PROMPTS = 65536


class PauseMode(str, Enum):
    """What becomes of running generations at `/pause_generation`."""

    ABORT = "abort"
    RETRACT = "retract"
    IN_PLACE = "in_place"


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine tells of its load; tokens are those of `/v1/loads`."""

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
    """Runs generations one token at a time, each in its caller's task.

    `token_latency_s` is slept before every token; it may be changed at any time.
    """

    def __init__(
        self,
        model: Model,
        *,
        weight_version: str = "default",
        token_latency_s: float = 0.0,
        replica: int = 0,
        enable_lora: bool = False,
        stream_abort_s: float = 2.0,
        dp_size: int = 1,
        heeds_ranks: bool = True,
    ) -> None:
        self.model = model
        self.dp_size = dp_size
        self.heeds_ranks = heeds_ranks
        self.stream_abort_s = stream_abort_s
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
        self.reused: set[tuple[str, str]] = set()
        """Whose weights filled what generations found in the prefix cache, and whose sampled."""
        self.cache = PrefixCache()
        self.scripts: deque[list[int]] = deque()
        """What the next generations are to say instead of sampling."""
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
        """What samples."""
        return self._weight_version

    @weight_version.setter
    def weight_version(self, version: str) -> None:
        self.catch_up()
        self._weight_version = version
        self.named_version = version
        """What `/model_info` names; SGLang's is still the old one after an update that failed half way."""

    def noise_for(self, rid: str | None, input_ids: list[int]) -> int:
        """What tells this sample apart from others of its prompt: its rid, or how often the prompt came without one."""
        if rid is not None:
            return key_of(rid)
        prompt = context_hash(input_ids)
        repeat = self._repeats.pop(prompt, 0)
        self._repeats[prompt] = repeat + 1
        if len(self._repeats) > _MAX_REMEMBERED_PROMPTS:
            self._repeats.popitem(last=False)
        return mix(self._replica + repeat)

    def reserve(self, rids: list[str]) -> None:
        """Take rids for one request; ValueError when one is in use."""
        for rid in rids:
            if rid in self._known_rids:
                raise ValueError(f"Duplicate request ID detected: {rid}")
        self._known_rids.update(rids)

    def unreserve(self, rids: list[str]) -> None:
        self._known_rids.difference_update(rids)

    def end_stream(self, rids: list[str]) -> None:
        """A stream has ended: what bears its rids `stream_abort_s` later is aborted (SGLang 0.5.23,
        `TokenizerManager.create_abort_task`), whoever asked for it."""
        self._ended_streams.append(rids)
        asyncio.get_running_loop().call_later(self.stream_abort_s, self._abort_ended, rids)

    def abort_ended_streams(self) -> None:
        """That time is over now for all streams that have ended."""
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
        """Wait while the worker is paused. Held requests are out of abort's reach, as in SGLang."""
        if self.paused is None:
            return
        self.held += 1
        try:
            await self.until(lambda: self.paused is None)
        finally:
            self.held -= 1

    def begin(self, request: GenerationRequest) -> Generation:
        """Put a generation among the running ones. The caller must `end()` it."""
        self._take_script(request)
        generation = Generation(self.model, request)
        generation.dp_rank = self._rank(request)
        key = cache_key(generation)
        generation.cached_tokens = self._cached_tokens(request, key)
        found = self.cache.versions(request.input_ids[: generation.cached_tokens], key)
        self.reused.update((version, self.weight_version) for version in found)
        self.cache.insert(request.input_ids, key, self.weight_version)
        self.running[request.rid] = generation
        self.pulse()
        return generation

    def end(self, generation: Generation) -> None:
        """Take a generation, finished or not, out of the running ones. Whoever goes on behind all that a script has
        said is told the rest of it."""
        self.running.pop(generation.request.rid, None)
        script, said = generation.request.script, len(generation.output_ids)
        if script is not None and said < len(script):
            self._rests[context_hash(sequence_of(generation))] = script[said:]
        self._leave_in_cache(generation)
        self.pulse()

    async def outputs(self, generation: Generation) -> AsyncIterator[None]:
        """Grow a generation; yields when it has something to show: at every token of a stream, else at the end."""
        while generation.finish_reason is None:
            await self._grow(generation)
            due = generation.request.stream or generation.finish_reason is not None
            if due and generation.flush():
                yield

    def abort(self, rid: str) -> None:
        """Abort running generations whose rid begins with `rid`, as SGLang matches them; unknown rids are ignored."""
        if rid and rid in self._known_rids:
            self._abort_where(lambda generation: generation.request.rid.startswith(rid))

    def client_left(self, rids: list[str], *, stream: bool) -> None:
        """Abort all that begins with these rids, whoever asked for it: SGLang 0.5.23 does so where a client leaves,
        for a stream 2 s later."""
        if stream:
            self._left_streams.append(rids)
            asyncio.get_running_loop().call_later(self.stream_abort_s, self.abort_left_streams)
        else:
            self._abort_beginning(rids)

    def abort_left_streams(self) -> None:
        """Do so now for the streams whose clients have left."""
        while self._left_streams:
            self._abort_beginning(self._left_streams.pop(0))

    def _abort_beginning(self, rids: list[str]) -> None:
        names = tuple(filter(None, rids))
        self._abort_where(lambda generation: generation.request.rid.startswith(names))

    def abort_all(self) -> None:
        self._abort_where(lambda generation: True)

    def pause(self, mode: PauseMode) -> None:
        """Hold new requests; running ones are aborted, or frozen until `resume()`."""
        self.paused = mode
        if mode is PauseMode.ABORT:
            self.abort_all()
        if mode is PauseMode.RETRACT:
            for generation in self.running.values():
                generation.waiting = True
                generation.retractions += 1
                generation.recomputed = len(generation.output_ids)
        self.pulse()

    def resume(self) -> None:
        self.paused = None
        for generation in self.running.values():
            generation.waiting = False
        self.pulse()

    def stop(self) -> None:
        """Stand still where it is, as a scheduler process that was stopped; what does not need it is answered."""
        self.stopped = True

    def go_on(self) -> None:
        """End that."""
        self.stopped = False
        self.pulse()

    async def turn(self) -> None:
        """Wait until the scheduler moves; a paused one does."""
        await self.until(lambda: not self.stopped)

    def load(self, rank: int = 0) -> Load:
        """What runs on a rank. SGLang shows retracted requests as running, since it publishes nothing new while it is
        paused."""
        running = [each for each in self.running.values() if each.dp_rank in (None, rank)]
        used = sum(generation.prompt_tokens + len(generation.output_ids) for generation in running)
        return Load(self.model.context_len, running=len(running), used_tokens=used)

    def catch_up(self) -> None:
        """Say what should be said by now; here every generation does that for itself."""

    def flush(self) -> None:
        """Forget the prefix cache."""
        self.cache.clear()

    async def idle(self) -> None:
        """Wait until nothing runs."""
        await self.until(lambda: not self.running)

    async def generates_before(self, deadline: float) -> bool:
        """Whether the engine moves and is out of its pause, or gets there, before a time of the loop's clock."""
        remaining = deadline - asyncio.get_running_loop().time()
        try:
            await asyncio.wait_for(self.until(self.generates), max(0.0, remaining))
        except asyncio.TimeoutError:
            return False
        return True

    def can_flush(self) -> bool:
        """Whether no generation holds memory; retracted ones do not."""
        return all(generation.waiting for generation in self.running.values())

    def _rank(self, request: GenerationRequest) -> int | None:
        """The rank that a request is pinned to, else the next one in turn."""
        if self.dp_size == 1:
            return None
        if request.routed_dp_rank is not None and self.heeds_ranks:
            return request.routed_dp_rank
        rank, self._next_rank = self._next_rank, (self._next_rank + 1) % self.dp_size
        return rank

    def _take_script(self, request: GenerationRequest) -> None:
        """What this generation is to say, if that was planned."""
        rest = self._rests.pop(context_hash(request.input_ids), None) if self._rests else None
        if rest is not None:
            request.script = rest
        elif self.scripts:
            request.script = self.scripts.popleft()

    def _leave_in_cache(self, generation: Generation) -> None:
        # The last id was sampled but never fed back, so its keys and values do not exist.
        self.cache.insert(sequence_of(generation)[:-1], cache_key(generation), self.weight_version)

    def _cached_tokens(self, request: GenerationRequest, key: str) -> int:
        """Logprobs of the prompt cost the cache: positions that need one are computed anew."""
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
        """Sample until there may be something to send: one token for a stream, a burst of them otherwise."""
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
        """Whether it moves and is out of its pause."""
        return self.paused is None and not self.stopped

    async def thaw(self, generation: Generation) -> None:
        """Wait until the engine works on a generation."""
        await self.turn()
        if self.paused in (PauseMode.RETRACT, PauseMode.IN_PLACE):
            await self.until(lambda: self.paused is None or generation.finish_reason is not None)

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait for something that `pulse` tells of."""
        while not condition():
            await self._changed.wait()

    def pulse(self) -> None:
        """Wake everyone who waits for a change of state; each looks again for itself."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def cache_key(generation: Generation) -> str:
    """What shares a prefix: each rank has a cache of its own, and so has each adapter."""
    request, rank = generation.request, generation.dp_rank
    parts = [request.extra_key or "", *(str(each) for each in (rank, request.lora_path) if each is not None)]
    return "\n".join(parts)
