"""Who runs when on one GPU: waiting queue, chunked prefill, decode batches, retraction. Pure, by a clock given to it.

As SGLang 0.5.23 with its defaults (`Scheduler.get_next_batch_to_run`, `PrefillAdder`, `ScheduleBatch.retract_decode`):

- first come, first served; whoever can be admitted is prefilled before anybody decodes, at most `chunk_tokens` at once;
- a job is admitted while its own tokens, and what it and the running ones may still say, fit what is free or evictable.
  What they may say is estimated: `max_new_tokens`, at most 4,096, times a ratio that sinks with every step and is set
  anew by a retraction. Once one does not fit, nobody is tried until a running one leaves;
- a job finds cached what the tree has when it is admitted, and leaves in it what it has computed;
- when the next step has no room, the jobs that have said least go back to the queue's end and lose what they said.

Steps are not simulated one by one: nothing happens between two events, and the time until the next is a sum.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from miles_router.testing.worker.costs.gpu import Gpu
from miles_router.testing.worker.costs.prefix_tree import ID_BYTES, Node, PrefixTree

_CLIP = 4096
_RATIO, _MIN_RATIO, _RATIO_STEPS = 0.7, 0.7 * 0.14, 600
_STEPS_AFTER_RETRACTION = 20


@dataclass(slots=True, eq=False)
class Job:
    """One sequence: `prompt` ids that are given, then those that it will say, all packed.

    `interval` is after how many tokens its owner wants to hear of it; 0 is at its end alone, else the first counts too.
    """

    ids: bytes
    prompt: int
    max_new_tokens: int
    interval: int = 0
    key: str = ""
    """Only jobs with the same one find each other's tokens cached."""
    made: int = 0
    """Tokens said so far."""
    cached: int | None = None
    """Prompt tokens that were found in the cache at the first admission; None before."""
    retractions: int = 0
    computed: int = 0
    """Tokens whose keys and values exist."""
    own: int = 0
    """Those of them that are not in the tree."""
    node: Node | None = None
    left: bool = False
    """Whether its owner has let go of it."""
    joined: int = 0
    """The step since which it decodes without a break, and what it had said then."""
    made_then: int = 0
    told: int = 0
    """Tokens of which its owner has heard."""

    @property
    def length(self) -> int:
        """How many tokens it will say."""
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
        """How many tokens it will have said when its owner is to hear of it."""
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
    """Since the start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    retractions: int = 0


@dataclass(slots=True)
class _Batch:
    """The jobs that decode, and whose milestone comes at which step."""

    jobs: dict[Job, None] = field(default_factory=dict)
    due: list[tuple[int, int, Job]] = field(default_factory=list)


class Schedule:
    """`enter`, `leave` and `advance` take the time, in seconds, which never goes back."""

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
        """Jobs that decode."""
        return len(self._batch.jobs)

    @property
    def unprefilled(self) -> int:
        """Tokens of the job that is prefilled in several chunks, behind those that are."""
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
        """What the batch says now; 0 while nobody decodes."""
        if not isinstance(work := self._work, _Decode):
            return 0.0
        return work.sequences / self.gpu.decode_seconds(1, work.sequences, self._context)

    @property
    def ends(self) -> float | None:
        """When what is being done is over; None at rest."""
        return self._work.ends if self._work else None

    def enter(self, job: Job, at: float) -> None:
        """Queue a job; ValueError for one that would not fit the memory alone."""
        if job.tokens + job.length + self.gpu.page_tokens > self.gpu.kv_tokens:
            raise ValueError(f"{job.prompt} + {job.length} tokens exceed the memory of {self.gpu.kv_tokens}")
        self._pass(at)
        self.waiting.append(job)
        if not self._full:
            self._cut()
        self._go_on()

    def leave(self, job: Job, at: float) -> None:
        """Let go of a job, wherever it is; what it computed stays cached. Harmless for one that is done."""
        self._pass(at)
        if job.left or (job.done and job.node is None):
            return
        job.left = True
        if job.node is None:
            self.waiting.remove(job)
        else:
            self._cut()

    def advance(self, to: float) -> list[Job]:
        """Let time pass. Gives the jobs that have reached a milestone since the last call, in order."""
        self._pass(to)
        heard, self._heard = self._heard, []
        return heard

    def retract_all(self, at: float) -> None:
        """Send everything that holds memory to the queue's front, as `/pause_generation` with `retract`; what was
        prefilled just now is lost. Nothing begins before `resume`."""
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
        """Begin work again after `retract_all`."""
        self._go_on()

    # Work

    def _go_on(self) -> None:
        """Begin the next work, unless there is some."""
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
        if isinstance(self._work, _Decode):  # so that `made` is right in the middle of it
            step = self._step + self._steps_taken(self._work)
            for job in self._batch.jobs:
                job.made = job.made_then + step - job.joined

    def _decode(self) -> _Decode:
        sequences = len(self._batch.jobs)
        steps = self._batch.due[0][0] - self._step
        steps = min(steps, max(1, (self.free + self.tree.evictable) // sequences))
        if self.waiting and not self._full:
            steps = 1  # a retraction has made room: they are tried again right away
        seconds = self.gpu.decode_seconds(steps, sequences, self._context)
        return _Decode(self.now + seconds, self.now, steps, sequences, self._context)

    def _cut(self) -> None:
        """End decoding with the step that is being taken: somebody came or left."""
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
            if job in self._batch.jobs and job.made >= job.milestone:  # else it was retracted since
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
        """Tell of a job if it is at a milestone, and plan the next; one that is done leaves."""
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
        """Who is prefilled next, and how many tokens of each; their memory is taken."""
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
        """Look a job up in the cache and lock what it finds there; False if it does not fit."""
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
        """Memory for the next of a job's tokens; those that exceed the chunk come with the next prefill."""
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
        """Retract until the next step fits."""
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
        """Put what a job has computed into the tree, where others find it; what is there already is freed."""
        assert job.node is not None
        node, _ = self.tree.insert(job.ids[: job.computed * ID_BYTES], job.key)
        self.tree.lock(node)
        self.tree.unlock(job.node)
        job.node = node
        # What is behind the last whole page stays its own.
        rest = job.computed % self.gpu.page_tokens
        self._own += rest - job.own
        job.own = rest

    def _release(self, job: Job, *, keep: bool) -> None:
        """Free a job's memory; with `keep` others may find what it computed."""
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
    """What a job is feared to say yet."""
    return min(max(job.max_new_tokens - job.made, 0), _CLIP)
