"""The schedule of one GPU: waiting queue, chunked prefill, decode batches, retraction. No I/O; callers pass the time.

It follows SGLang 0.5.23 with its defaults (`Scheduler.get_next_batch_to_run`, `PrefillAdder`,
`ScheduleBatch.retract_decode`):

- Jobs are served in order of arrival. Jobs that can be admitted are prefilled before any decode step, at most
  `chunk_tokens` at once.
- A job is admitted if its tokens, plus the expected output of it and the running jobs, fit the free and evictable
  memory. The expected output is `max_new_tokens`, at most 4,096, times a ratio for running jobs. The ratio sinks with
  every step and is set again by a retraction. After a job that does not fit, none is tried until a running job leaves.
- A job uses the cache's content at its admission, and adds to it what it has computed.
- If the next step does not fit the memory, the jobs with the fewest generated tokens are retracted: they return to the
  end of the queue, and their KV entries are lost.

Steps are not simulated one by one: nothing changes between two events, so their time is computed as a sum.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from tests.support.simulated.costs.gpu import Gpu
from tests.support.simulated.costs.prefix_tree import ID_BYTES, Node, PrefixTree

_CLIP = 4096
_RATIO, _MIN_RATIO, _RATIO_STEPS = 0.7, 0.7 * 0.14, 600
_STEPS_AFTER_RETRACTION = 20


@dataclass(slots=True, eq=False)
class Job:
    """One sequence: `prompt` ids, then the ids that it will generate, all packed in `ids`.

    Its owner is notified every `interval` generated tokens and at the first one; with 0, only at the end.
    """

    ids: bytes
    prompt: int
    max_new_tokens: int
    interval: int = 0
    key: str = ""
    """The cache key: only jobs with equal keys share cached tokens."""
    made: int = 0
    """Tokens generated so far."""
    cached: int | None = None
    """Prompt tokens found in the cache at the first admission; None before."""
    retractions: int = 0
    computed: int = 0
    """Tokens whose KV entries exist."""
    own: int = 0
    """Those of the computed tokens that are not in the tree."""
    node: Node | None = None
    left: bool = False
    """Whether its owner has removed it."""
    joined: int = 0
    """The step at which it joined the decode batch, and its `made` at that step."""
    made_then: int = 0
    told: int = 0
    """The value of `made` at the last notification of its owner."""

    @property
    def length(self) -> int:
        """The number of tokens that it will generate."""
        return len(self.ids) // ID_BYTES - self.prompt

    @property
    def tokens(self) -> int:
        return self.prompt + self.made

    @property
    def done(self) -> bool:
        return self.made >= self.length

    @property
    def waiting(self) -> bool:
        return self.node is None and not self.done

    @property
    def milestone(self) -> int:
        """The value of `made` at which its owner is notified next."""
        if not self.interval:
            return self.length
        return min(self.length, self.told + self.interval if self.told else 1)


@dataclass(slots=True)
class _Prefill:
    ends: float
    parts: list[tuple[Job, int]]


@dataclass(slots=True)
class _Decode:
    ends: float
    begins: float
    steps: int
    sequences: int
    context: int


@dataclass(slots=True)
class Counts:
    """Sums since the start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    retractions: int = 0


@dataclass(slots=True)
class _Batch:
    """The jobs in the decode batch, and a heap of their next milestones by step."""

    jobs: dict[Job, None] = field(default_factory=dict)
    due: list[tuple[int, int, Job]] = field(default_factory=list)


class Schedule:
    """The state of the GPU. `enter`, `leave` and `advance` take the time in seconds, which must not decrease."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.tree = PrefixTree(gpu.page_tokens)
        self.counts = Counts()
        self.now = 0.0
        self.waiting: deque[Job] = deque()
        self._batch = _Batch()
        self._chunked: Job | None = None
        self._own = 0
        self._context = 0
        self._step = 0
        self._ratio = _RATIO
        self._full = False
        self._work: _Prefill | _Decode | None = None
        self._entries = 0
        self._heard: list[Job] = []

    @property
    def running(self) -> int:
        return len(self._batch.jobs)

    @property
    def unprefilled(self) -> int:
        """Tokens not yet prefilled of the job that is prefilled in several chunks."""
        return self._chunked.tokens - self._chunked.computed if self._chunked else 0

    @property
    def used(self) -> int:
        """Tokens of memory that cannot be freed without a retraction."""
        return self.tree.locked + self._own

    @property
    def free(self) -> int:
        return self.gpu.kv_tokens - self.tree.size - self._own

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second that the batch generates now; 0 while no decode step runs."""
        if not isinstance(work := self._work, _Decode):
            return 0.0
        return work.sequences / self.gpu.decode_seconds(1, work.sequences, self._context)

    @property
    def ends(self) -> float | None:
        """When the current work ends; None if idle."""
        return self._work.ends if self._work else None

    def enter(self, job: Job, at: float) -> None:
        """Queue a job.

        Raises:
            ValueError: it would not fit the memory even alone.
        """
        if job.tokens + job.length + self.gpu.page_tokens > self.gpu.kv_tokens:
            raise ValueError(f"{job.prompt} + {job.length} tokens exceed the memory of {self.gpu.kv_tokens}")
        self._pass(at)
        self.waiting.append(job)
        if not self._full:
            self._cut()
        self._go_on()

    def leave(self, job: Job, at: float) -> None:
        """Remove a job in any state; its computed tokens stay cached. Does nothing for a finished job."""
        self._pass(at)
        if job.left or (job.done and job.node is None):
            return
        job.left = True
        if job.node is None:
            self.waiting.remove(job)
        else:
            self._cut()

    def advance(self, to: float) -> list[Job]:
        """Advance the time. Return the jobs that have reached a milestone since the last call, in order."""
        self._pass(to)
        heard, self._heard = self._heard, []
        return heard

    def retract_all(self, at: float) -> None:
        """Retract all jobs to the front of the queue, as `/pause_generation` with `retract` does. A running prefill is
        lost. No work begins before `resume`."""
        self._pass(at)
        work, self._work = self._work, None
        if isinstance(work, _Decode):
            work.steps = self._steps_taken(work)
            self._end_decode(work)
        prefilled = [job for job, _ in work.parts] if isinstance(work, _Prefill) else []
        for job in reversed([*self._batch.jobs, *prefilled]):
            self._release(job, keep=False)
            if not job.left:
                job.retractions += 1
                self.waiting.appendleft(job)
        self._chunked = None

    def resume(self) -> None:
        self._go_on()

    # Work

    def _go_on(self) -> None:
        """Begin the next prefill or decode, if idle."""
        if self._work is not None:
            return
        if parts := self._admit():
            seconds = self.gpu.prefill_seconds([(tokens, job.computed) for job, tokens in parts])
            self.counts.prefill_seconds += seconds
            self._work = _Prefill(self.now + seconds, parts)
        elif self._batch.jobs:
            self._make_room()
            self._work = self._decode()

    def _pass(self, to: float) -> None:
        while self._work is not None and self._work.ends <= to:
            self.now = self._work.ends
            work, self._work = self._work, None
            if isinstance(work, _Prefill):
                self._end_prefill(work)
            else:
                self._end_decode(work)
            self._go_on()
        self.now = max(self.now, to)
        if isinstance(self._work, _Decode):  # keeps `made` right in the middle of the decode steps
            step = self._step + self._steps_taken(self._work)
            for job in self._batch.jobs:
                job.made = job.made_then + step - job.joined

    def _decode(self) -> _Decode:
        sequences = len(self._batch.jobs)
        steps = self._batch.due[0][0] - self._step
        steps = min(steps, max(1, (self.free + self.tree.evictable) // sequences))
        if self.waiting and not self._full:
            steps = 1  # a retraction has freed memory: try the waiting jobs again at once
        seconds = self.gpu.decode_seconds(steps, sequences, self._context)
        return _Decode(self.now + seconds, self.now, steps, sequences, self._context)

    def _cut(self) -> None:
        """End decoding after the current step, because a job has come or left."""
        if isinstance(work := self._work, _Decode):
            work.steps = min(work.steps, self._steps_taken(work) + 1)
            work.ends = work.begins + self.gpu.decode_seconds(work.steps, work.sequences, work.context)

    def _steps_taken(self, work: _Decode) -> int:
        return min(work.steps, self.gpu.decode_steps(self.now - work.begins, work.sequences, work.context))

    def _end_decode(self, work: _Decode) -> None:
        self.counts.decode_seconds += self.now - work.begins
        self._step += work.steps
        self._context += work.steps * work.sequences
        self._ratio = max(_MIN_RATIO, self._ratio - work.steps * (_RATIO - _MIN_RATIO) / _RATIO_STEPS)
        self._evict_for(work.steps * work.sequences)
        self._own += work.steps * work.sequences
        for job in list(self._batch.jobs):
            job.own += work.steps
            job.computed += work.steps
            job.made = job.made_then + self._step - job.joined
            if job.left:
                self._release(job, keep=True)
        due = self._batch.due
        while due and due[0][0] <= self._step:
            job = heapq.heappop(due)[2]
            if job in self._batch.jobs and job.made >= job.milestone:  # else it was retracted meanwhile
                self._hear(job)

    def _end_prefill(self, work: _Prefill) -> None:
        for job, tokens in work.parts:
            job.computed += tokens
            self._share(job)
            if job.left:
                if job is self._chunked:
                    self._chunked = None
                self._release(job, keep=True)
            elif job.computed == job.tokens:
                job.made += 1
                self._join(job)
                self._hear(job)

    def _join(self, job: Job) -> None:
        job.joined, job.made_then = self._step, job.made
        self._batch.jobs[job] = None
        self._context += job.tokens

    def _hear(self, job: Job) -> None:
        """Report a job that is at a milestone, and plan its next one. Release a finished job."""
        if job.made >= job.milestone:
            job.told = job.made
            self._heard.append(job)
        if job.done:
            self._release(job, keep=True)
            return
        self._entries += 1
        heapq.heappush(self._batch.due, (self._step + job.milestone - job.made, self._entries, job))

    # Memory

    def _admit(self) -> list[tuple[Job, int]]:
        """Choose the jobs of the next prefill and allocate their memory. Return (job, number of tokens) pairs."""
        parts: list[tuple[Job, int]] = []
        if self._chunked is not None:
            job, self._chunked = self._chunked, None
            self._take(parts, job, self.gpu.chunk_tokens)
        if not self._batch.jobs:
            self._full = False
        if self._full or not self.waiting:
            return parts
        chunk = self.gpu.chunk_tokens - sum(tokens for _, tokens in parts)
        promised = self._ratio * sum(map(_may_say, self._batch.jobs)) + sum(_may_say(job) for job, _ in parts)
        while self.waiting and chunk > 0:
            job = self.waiting[0]
            alone = not parts and not self._batch.jobs
            if len(self._batch.jobs) + len(parts) >= self.gpu.max_running or not self._find(job, promised, alone):
                self._full = not alone
                break
            chunk -= self._take(parts, self.waiting.popleft(), chunk)
            promised += _may_say(job)
        return parts

    def _find(self, job: Job, promised: float, alone: bool) -> bool:
        """Find a job's cached prefix and lock it. Return False, with no lock, if the job does not fit."""
        # The last token is always computed, since the next is sampled from it.
        node, known = self.tree.match(job.ids[: (job.tokens - 1) * ID_BYTES], job.key)
        self.tree.lock(node)
        wanted = job.tokens - known + self.gpu.page_tokens + (0 if alone else _may_say(job))
        if wanted >= self.free + self.tree.evictable - promised:
            self.tree.unlock(node)
            return False
        job.node, job.computed, job.own = node, known, 0
        self.counts.prompt_tokens += job.tokens
        self.counts.cached_tokens += known
        if job.cached is None:
            job.cached = min(known, job.prompt)
        return True

    def _take(self, parts: list[tuple[Job, int]], job: Job, chunk: int) -> int:
        """Allocate memory for a job's next tokens, at most `chunk`, and return their number. The rest waits for the
        next prefill."""
        missing = job.tokens - job.computed
        tokens = min(chunk, missing)
        if tokens < missing:
            self._chunked = job
        self._evict_for(tokens)
        self._own += tokens
        job.own += tokens
        parts.append((job, tokens))
        return tokens

    def _evict_for(self, tokens: int) -> None:
        if (lacking := tokens - self.free) > 0:
            self.tree.evict(lacking)

    def _make_room(self) -> None:
        """Retract jobs until the next step fits the memory."""
        batch = self._batch.jobs
        if self.free + self.tree.evictable >= len(batch):
            return
        order = sorted(batch, key=lambda job: (job.made, -job.prompt), reverse=True)
        while len(order) > 1 and self.free + self.tree.evictable < len(order):
            job = order.pop()
            self._release(job, keep=False)
            job.retractions += 1
            self.counts.retractions += 1
            self.waiting.append(job)
        said = sum(job.made for job in order)
        allowed = sum(job.max_new_tokens for job in order)
        self._ratio = min(1.0, (said + _STEPS_AFTER_RETRACTION * len(order)) / (allowed + 1))

    def _share(self, job: Job) -> None:
        """Move a job's computed tokens into the tree, for other jobs to use. Free those that the tree already has."""
        assert job.node is not None
        node, _ = self.tree.insert(job.ids[: job.computed * ID_BYTES], job.key)
        self.tree.lock(node)
        self.tree.unlock(job.node)
        job.node = node
        # Tokens after the last whole page stay the job's own.
        rest = job.computed % self.gpu.page_tokens
        self._own += rest - job.own
        job.own = rest

    def _release(self, job: Job, *, keep: bool) -> None:
        """Free a job's memory. With `keep`, its computed tokens stay in the cache."""
        assert job.node is not None
        if job in self._batch.jobs:
            del self._batch.jobs[job]
            self._context -= job.tokens
            self._full = False
        if keep:
            self._share(job)
        self._own -= job.own
        self.tree.unlock(job.node)
        job.node, job.own, job.computed = None, 0, 0


def _may_say(job: Job) -> int:
    """Return the number of further tokens that are reserved for a job."""
    return min(max(job.max_new_tokens - job.made, 0), _CLIP)
