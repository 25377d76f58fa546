"""The pool of workers as a state machine: which are registered, which are routable, and their requests in flight.

    expect ──> UNREACHED ──(answers, or registers itself)──> READY
    add ──> READY ──(K consecutive failures)──> QUARANTINED ──(check passes, readmission agrees)──> READY
              │ ├──(weights differ from the fleet's)──> OUTDATED ──(same weights again)──> READY
              │ └──(paused by another program)──> PAUSED ──(resumes)──> READY
              └── drain ──> DRAINING (from any state)           remove: forgotten, from any state

Two things must never be wrong: `in_flight` (a `Lease` adds one and subtracts it exactly once, whatever happens) and the
snapshot of routable units (rebuilt on every transition, never filtered per request). No I/O, no asyncio: checks and
requests report their observations, and this module decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

from miles_router.errors import NoWorkerAvailable, PolicyFault
from miles_router.fleet.caches import PrefixCaches, new_number
from miles_router.fleet.placement.contract import Policy, placement_request
from miles_router.fleet.placement.sessions import Admission, Homes, prefill_key
from miles_router.fleet.snapshot import why_no_worker
from miles_router.fleet.worker_table import Lease, PaceEstimates, WorkerTable
from miles_router.fleet.worker_url import WorkerUrl
from miles_router.fleet.workers import (
    ALIVE,
    DRAINING,
    EXPECTED,
    REGISTERED,
    Transition,
    Unit,
    Worker,
    WorkerState,
    other_weights,
    voted_version,
)

#: A failure threshold that is never reached: failed checks do not quarantine workers.
NEVER = 2**31
ReadmitPolicy = Literal["same-weights", "healthy", "never"]


class WorkerPool(WorkerTable):
    """The registered workers, their states, and the leases on their units."""

    def __init__(
        self,
        *,
        failure_threshold: int = 3,
        readmit: ReadmitPolicy = "same-weights",
        now: Callable[[], float] = time.time,
        homes: Homes | None = None,
        admission: float = 0.0,
    ) -> None:
        super().__init__()
        self.homes, self.paces = Homes() if homes is None else homes, PaceEstimates()
        self.admission = Admission(admission, self.homes, lambda: self.snapshot)
        self.weight_version: str | None = None
        self.unnamed_weights, self.updated = False, False  # the last update named no version; there was one
        #: Odd while a weight update is under way. A version that was read under another epoch must be discarded.
        self.weights_epoch = 0
        self._failure_threshold = failure_threshold
        self._readmit, self._now = readmit, now
        #: Returns True if a worker has no requests in flight. With several processes it asks for theirs too.
        self.is_idle: Callable[[Worker], bool] = lambda worker: not worker.in_flight
        #: Set where another process decides: reports an observation `(what, worker, reason)` to that process.
        self.report: Callable[[str, Worker, str], None] | None = None
        #: How many stalls of workers were detected.
        self.stalls = 0
        self._settling = False
        self._when_idle: dict[str, list[Callable[[], None]]] = {}
        self._choices = 0
        #: Simulates choices of other processes among these units, before a choice for a request of no known session.
        self.simulate_others: Callable[[Sequence[Unit]], None] | None = None
        self._weights_changed = False  # of any worker, ever

    @property
    def has_stragglers(self) -> bool:
        """Whether any worker answers but gets no requests only because its weights differ."""
        return self._readmit == "same-weights" and any(
            worker.state in (WorkerState.OUTDATED, WorkerState.QUARANTINED)
            and not worker.failures
            and other_weights(worker, self.weight_version)
            for worker in self
        )

    # Registration

    def add(
        self,
        address: WorkerUrl,
        *,
        api_key: str | None = None,
        attributes: Mapping[str, object] | None = None,
        weight_version: str | None = None,
    ) -> Worker:
        """Register a worker and return it; routable at once, unless its `weight_version` differs from the fleet's. For
        a registered worker only change the key and attributes given, and end a drain, but not a quarantine."""
        if (known := self._workers.get(address.url)) is not None:
            self._update(known, api_key, attributes)
            self.make_ready(known, weight_version)
            return known
        worker = self._create(address, api_key, attributes)
        self._make_ready(worker, weight_version, before=None)
        return worker

    def _create(self, address: WorkerUrl, api_key: str | None, attributes: Mapping[str, object] | None) -> Worker:
        # A worker that was removed and returns while old requests still run keeps counting them.
        worker = self._leaving.pop(address.url, None)
        if worker is None:
            worker = Worker(address, api_key=api_key, attributes=attributes or {}, now=self._now())
        else:
            self._update(worker, api_key, attributes)
            self._end_drain(worker)
            worker.caches.change(worker.weight_version, new_number())  # its old requests may still fill caches
            worker.failures, worker.weight_version = 0, None
        return self._register(worker)

    def add_unreached(
        self, address: WorkerUrl, *, api_key: str | None = None, attributes: Mapping[str, object] | None = None
    ) -> Worker:
        """Register a worker like `add`; a new one is not routable before it passes a check, if checks quarantine."""
        if (known := self._workers.get(address.url)) is not None:
            if known.state is DRAINING:  # nothing but a list says that it lives
                self._move(known, WorkerState.UNREACHED, EXPECTED, before=known.state)
                self._end_drain(known)
            self._update(known, api_key, attributes)
            return known
        if self._failure_threshold >= NEVER:
            return self.add(address, api_key=api_key, attributes=attributes)
        worker = self._create(address, api_key, attributes)
        self._move(worker, WorkerState.UNREACHED, EXPECTED, before=None)
        return worker

    def make_ready(self, worker: Worker, weight_version: str | None) -> None:
        """Make a worker routable that had not answered yet; a worker in another state is not changed."""
        if self._is_in(worker, WorkerState.UNREACHED):
            worker.failures = 0
            self._make_ready(worker, weight_version, before=worker.state)

    def _make_ready(self, worker: Worker, weight_version: str | None, *, before: WorkerState | None) -> None:
        # Its prefix cache may hold entries of older weights of this fleet, or of other weights.
        self._weights_changed |= weight_version not in (None, self.weight_version)
        worker.caches = PrefixCaches(new_number() if self._weights_changed else 0)
        worker.weight_version, worker.missed_update = weight_version, self.unnamed_weights
        self._move(worker, WorkerState.READY, REGISTERED, before=before)

    def set_unreached_reason(self, worker: Worker, reason: str) -> None:
        """Set the reason why a worker has not answered yet. Listeners are called only when the reason changes."""
        reason = f"{EXPECTED}: {reason}"
        if self._is_in(worker, WorkerState.UNREACHED) and worker.reason != reason:
            self._move(worker, WorkerState.UNREACHED, reason, before=worker.state)

    def distrust_caches(self) -> None:
        """Stop reusing prefix caches, of later workers too: another router may have filled them under old weights."""
        self._weights_changed = True
        for worker in self:
            worker.caches = PrefixCaches(new_number())

    def _update(self, worker: Worker, api_key: str | None, attributes: Mapping[str, object] | None) -> None:
        new_key = api_key is not None and worker.set_key(api_key)
        if attributes is not None:
            worker.set_attributes(attributes)
        if attributes is not None or new_key:
            self._publish()
            self._settle_weights()
        if worker.state is DRAINING and worker.url in self._workers:
            worker.failures = 0
            self._move(worker, WorkerState.READY, "registered again while draining", before=worker.state)
            self._end_drain(worker)

    def remove(self, worker: Worker, reason: str = "removed") -> None:
        """Forget a worker now; its requests in flight may finish. Removing it twice does nothing."""
        if self._workers.get(worker.url) is not worker:
            return
        del self._workers[worker.url]
        worker.serial = 0
        if not self.is_idle(worker):
            self._leaving[worker.url] = worker
        self._publish()
        self._notify(Transition(worker, worker.state, None, reason))
        self._settle_weights()

    def drain(self, worker: Worker, when_idle: Callable[[], None]) -> None:
        """Send a worker no new requests, and remove it after its last. Then call `when_idle`, or if it is re-added."""
        if worker.state is not DRAINING:
            self._move(worker, DRAINING, "drain requested", before=worker.state)
        self._when_idle.setdefault(worker.url, []).append(when_idle)
        if self.is_idle(worker):
            self.finish_leaving(worker)

    # Requests

    def lease(
        self,
        policy: Policy,
        key: str | None = None,
        excluded: Collection[Worker] = (),
        preferred: str | None = None,
        rank: int | None = None,
        tokens: int = 0,
        body: bytes = b"",
        *,
        generates: bool = False,
    ) -> Lease:
        """Lease the unit that `policy` chooses among the routable units, or among the paused ones if none is routable.

        Args:
            key: the session. The unit becomes its home, unless only this request cannot go to its present home.
            preferred: the URL of a worker that is chosen if it is a candidate. The same holds for `rank`.
            tokens: the length of the prompt; 0 for a request that generates nothing.
            generates: choose only among units that take generations.

        Raises:
            NoWorkerAvailable: no worker is registered or routable, or all routable workers are excluded.
        """
        snapshot = self.snapshot
        at_home: Sequence[Unit] = (snapshot.generating if generates else snapshot.routable) or snapshot.paused
        candidates = at_home
        if excluded:
            candidates = snapshot.remaining(excluded, generates=generates)
        if not candidates:
            raise NoWorkerAvailable(why_no_worker(self._workers.values()))
        if preferred is not None:
            candidates = [unit for unit in candidates if unit.worker.url == preferred] or candidates
        if rank is not None:
            candidates = [unit for unit in candidates if unit.rank == rank] or candidates
        return self._choose(policy, key, candidates, at_home, tokens, body)

    def lease_prefill(
        self, policy: Policy, key: str | None, excluded: Collection[Worker], tokens: int, body: bytes
    ) -> Lease:
        """Lease a prefill unit, which computes the prompt of a generation that a decode unit answers. A session has a
        home among the prefill units too. The other arguments are the same as for `lease`.

        Raises:
            NoWorkerAvailable: no prefill worker is routable and not excluded.
        """
        if not (candidates := [unit for unit in self.snapshot.prefill if unit.worker not in excluded]):
            raise NoWorkerAvailable(why_no_worker(self._workers.values()))
        key = None if key is None else prefill_key(key)
        return self._choose(policy, key, candidates, self.snapshot.prefill, tokens, body)

    def _choose(
        self,
        policy: Policy,
        key: str | None,
        candidates: Sequence[Unit],
        at_home: Sequence[Unit],
        tokens: int,
        body: bytes,
    ) -> Lease:
        """Lease a candidate. `at_home`: units on which a session keeps its home though this request cannot go there."""
        if self.admission.is_limited:
            candidates = self.admission.units_with_room(key, candidates, tokens)
        known = self.homes.find(key)
        if len(candidates) == 1:
            unit = candidates[0]
        elif known is None:
            if self.simulate_others is not None:
                self.simulate_others(at_home)
            unit = policy.choose(candidates, placement_request((None, 0, 0, tokens, body, 0)))
        else:
            home = known.unit if known.unit in candidates else None
            request = placement_request((home, known.stayed, known.running, tokens, body, known.moved))
            try:
                unit = policy.choose(candidates, request)
            except PolicyFault:
                self.homes.count_idle(known)
                raise
        self._choices += 1
        unit.chosen_at = self._choices
        at = None if key is None else self.homes.record_choice(key, known, unit, candidates, at_home, tokens)
        return Lease(self, unit, tokens, at)

    def record_release(self, lease: Lease, *, answered: bool) -> None:
        """Subtract a released lease from its unit's counts; `Lease.release` calls this once."""
        unit, worker = lease.unit, lease.worker
        unit.in_flight -= 1
        unit.tokens -= lease.tokens
        if lease.home is not None:
            self.homes.record_end(lease.home, lease.tokens, answered=answered)
        worker.in_flight -= 1
        assert unit.in_flight >= 0, f"{unit!r} released more often than leased"
        if (worker.state is DRAINING or self._leaving) and self.is_idle(worker):
            self.finish_leaving(worker)

    def finish_leaving(self, worker: Worker) -> None:
        """Finish the drain or removal of a worker that has no requests in flight any more."""
        if worker.state is DRAINING:
            self.remove(worker, "drained")
            self._end_drain(worker)
        if self._leaving.get(worker.url) is worker:
            del self._leaving[worker.url]

    def _end_drain(self, worker: Worker) -> None:
        for call in self._when_idle.pop(worker.url, ()):
            call()

    def set_ranks(self, worker: Worker, count: int, fault: str | None = None) -> bool:
        """Call `Worker.set_ranks` and rebuild the snapshot if the units changed. Return True if they did."""
        if changed := worker.set_ranks(count, fault):
            self._publish()
        return changed

    # Health

    def record_failure(self, worker: Worker, reason: str) -> None:
        """Record a failed check or connection; the K-th failure in a row quarantines the worker."""
        worker.failures, worker.last_check = worker.failures + 1, self._now()
        self._forget_engine(worker)
        if self.report is not None:
            self.report("failure", worker, reason)
            return
        self.set_unreached_reason(worker, reason)
        if worker.failures >= self._failure_threshold and worker.state in ALIVE and self._is_in(worker, worker.state):
            worker.missed_update |= self.unnamed_weights  # it may restart, with the weights from its disk
            self._move(worker, WorkerState.QUARANTINED, reason, before=worker.state)

    def _forget_engine(self, worker: Worker) -> None:
        """Forget the worker's engine: the next process may have other weights, which most engines report themselves."""
        if self.report is None and worker.engine is not None and not worker.engine.tells_version:
            worker.weight_version = None
        worker.forget_engine()
        self._publish()

    def record_stall(self, worker: Worker, reason: str) -> None:
        """Quarantine a worker whose engine stalled. It keeps this reason while it is silent. Each router process with
        requests there observes the stall; only the first observation counts."""
        if worker.stalled:
            return
        self.stalls += 1
        if worker.state is not DRAINING and self._workers.get(worker.url) is worker:
            self._move(worker, WorkerState.QUARANTINED, reason, before=worker.state)
        worker.stalled = True
        if self.report is not None:
            self.report("stall", worker, reason)

    def record_alive(self, worker: Worker, weight_version: str | None) -> None:
        """Record a passed liveness check and the version it reported. A quarantined worker also needs `readmit`."""
        worker.failures, worker.last_check = 0, self._now()
        if weight_version is not None and weight_version != worker.weight_version:
            before = self.weight_version if worker.weight_version is None else worker.weight_version
            if before not in (None, weight_version):  # changed by another program, perhaps before it joined
                self._change_caches([worker])
                worker.missed_update = self.unnamed_weights = False  # weights have a name again
            worker.weight_version = weight_version
            self._settle_weights()

    @contextmanager
    def changing_weights(self) -> Iterator[None]:
        """Discard weight versions that checks read within this context, and let no two generations share a prefix
        cache. The caches change even if the update is refused, since it may have taken effect."""
        self.weights_epoch += 1
        self._change_caches(self, under_way=True)
        try:
            yield
        finally:
            self.weights_epoch += 1
            self._change_caches(self)

    def _change_caches(self, workers: Iterable[Worker], *, under_way: bool = False) -> None:
        self._weights_changed, number = True, new_number()
        for worker in workers:
            worker.caches.change(worker.weight_version, number, under_way=under_way)

    def name_version(self, workers: Collection[Worker], version: str) -> None:
        """Set the weight version of workers whose engines do not report it, after another program updated them."""
        self._change_caches(workers)
        self.record_update(workers, version)

    def record_update(self, workers: Collection[Worker], version: str | None, *, changed: bool = True) -> None:
        """Record that `workers` got new weights, or with `changed` False only a new name for their version.
        `version` is None if it is unknown. Under `same-weights` the other workers get no requests until updated."""
        self.weight_version, self.unnamed_weights, self.updated = version, version is None, True
        for worker in self:
            worker.missed_update = (version is None or worker.missed_update) and not (changed and worker in workers)
        for worker in workers if version is not None else ():
            worker.weight_version = version
        self._settle_weights()

    def set_paused(self, worker: Worker, reason: str) -> None:
        """Record that a worker answers but does not generate."""
        if worker.state is not WorkerState.PAUSED and worker.state in ALIVE and self._is_in(worker, worker.state):
            self._move(worker, WorkerState.PAUSED, reason, before=worker.state)

    def set_unpaused(self, worker: Worker) -> None:
        """Record that a paused worker generates again."""
        if self._is_in(worker, WorkerState.PAUSED):
            self._move(worker, WorkerState.READY, "resumed", before=worker.state)

    def readmission_refused(self, worker: Worker) -> str | None:
        """Return why the readmission setting keeps a recovered worker out, or None if the worker may return."""
        if self._readmit == "never":
            return "the readmission policy is 'never': remove and add the worker"
        return other_weights(worker, self.weight_version, must_say=True) if self._readmit == "same-weights" else None

    def readmit(self, worker: Worker, reason: str) -> bool:
        """Make a quarantined worker routable again if the readmission setting permits it. Return True if it is."""
        if not self._is_in(worker, WorkerState.QUARANTINED) or self.readmission_refused(worker):
            return False
        self._move(worker, WorkerState.READY, reason, before=worker.state)
        return True

    def set_quarantine_reason(self, worker: Worker, reason: str) -> None:
        """Set the reason why an answering worker stays quarantined. Listeners are called only when it changes."""
        if self._is_in(worker, WorkerState.QUARANTINED) and worker.reason != reason:
            self._move(worker, WorkerState.QUARANTINED, reason, before=worker.state)

    def _is_in(self, worker: Worker, state: WorkerState) -> bool:
        return worker.state is state and self._workers.get(worker.url) is worker

    def _settle_weights(self) -> None:
        """Vote on the fleet's weight version, and move workers between READY and OUTDATED. Removals need this too."""
        if self._settling or self.report is not None:
            return
        self._settling = moved = True
        try:
            while moved:
                if not self.unnamed_weights:
                    routable = bool(self.snapshot.routable)
                    self.weight_version = voted_version(self, self.weight_version, routable, self.updated)
                moved = self._readmit == "same-weights" and self._move_one_by_weights()
        finally:
            self._settling = False
        self.when_settled()

    def _move_one_by_weights(self) -> bool:
        """Move one worker whose state does not match its weights to OUTDATED or READY. Return True if one moved."""
        for worker in self:
            reason = other_weights(worker, self.weight_version)
            worker.vouched |= worker.state is WorkerState.READY and worker.weight_version == self.weight_version
            before = WorkerState.OUTDATED if reason is None else WorkerState.READY
            if worker.state is before:
                after = WorkerState.READY if reason is None else WorkerState.OUTDATED
                self._move(worker, after, reason or f"has weight version {worker.weight_version!r}", before=before)
                return True
        return False

    def _move(self, worker: Worker, state: WorkerState, reason: str, *, before: WorkerState | None) -> None:
        worker.state, worker.reason, worker.since, worker.stalled = state, reason, self._now(), False
        self._publish()
        self._notify(Transition(worker, before, state, reason))
        self._settle_weights()
