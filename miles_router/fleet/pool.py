"""The pool of workers as a state machine: who is registered, what may be chosen, how many requests each carries.

    expect ──> UNREACHED ──(answers, or registers itself)──> READY
    add ──> READY ──(K consecutive failures)──> QUARANTINED ──(probe passes, policy agrees)──> READY
              │ ├──(other weights than the fleet's)──> OUTDATED ──(the same again)──> READY
              │ └──(paused by somebody else)──> PAUSED ──(goes on)──> READY
              └── drain ──> DRAINING (from any state)           remove: forgotten, from any state

Two things must never be wrong: `in_flight` (a `Lease` adds one and gives it back exactly once, whatever happens) and
the snapshot of what is routable (made anew on every transition, never filtered per request). No I/O, no asyncio: probes
and requests report what they saw, and this module decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

from miles_router.errors import NoWorkerAvailable, PolicyFault
from miles_router.fleet.caches import PrefixCaches, new_number
from miles_router.fleet.lease import Lease
from miles_router.fleet.members import Members
from miles_router.fleet.placement.admission import Admission
from miles_router.fleet.placement.contract import Policy, placement_request
from miles_router.fleet.placement.homes import Homes, prefill_key
from miles_router.fleet.placement.paces import Paces
from miles_router.fleet.snapshot import why_none
from miles_router.fleet.worker_url import WorkerUrl
from miles_router.fleet.workers import (
    ALIVE,
    EXPECTED,
    REGISTERED,
    Transition,
    Unit,
    Worker,
    WorkerState,
    other_weights,
    voted_version,
)

#: A number of failures in a row that is never reached: no check takes a worker out.
NEVER = 2**31
ReadmitPolicy = Literal["same-weights", "healthy", "never"]


class WorkerPool(Members):
    """The registered workers, and what becomes of them."""

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
        #: Where sessions are, and whether others may begin.
        self.homes, self.paces = Homes() if homes is None else homes, Paces()
        self.admission = Admission(admission, self.homes, lambda: self.snapshot)
        self.weight_version: str | None = None
        self.unnamed_weights = False  # the last update named no version
        #: Odd while an update of the weights is under way; a version that was asked for under another number is none.
        self.weights_epoch = 0
        self._failure_threshold = failure_threshold
        self._readmit = readmit
        self._now = now
        #: Whether nobody has requests at a worker. Where there are several processes, others may have some.
        self.is_idle: Callable[[Worker], bool] = lambda worker: not worker.in_flight
        #: Is told `(what, worker, reason)` in place of a decision here, where another process decides.
        self.report: Callable[[str, Worker, str], None] | None = None
        #: How many workers were found stalled.
        self.stalls = 0
        self._settling = False
        self._when_idle: dict[str, list[Callable[[], None]]] = {}
        self._choices = 0
        #: Supposes what other processes choose among these units, before this one chooses for a request of no session.
        self.let_others_choose: Callable[[Sequence[Unit]], None] | None = None
        self._weights_changed = False  # of some worker, some time

    @property
    def has_stragglers(self) -> bool:
        """Whether somebody who answers takes no traffic for its weights alone."""
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
        """Register a worker; routable at once, unless its `weight_version` (if known) is not the fleet's. Again: that
        changes only the key and attributes given, and ends a drain, but not a quarantine."""
        if (known := self._workers.get(address.url)) is not None:
            self._update(known, api_key, attributes)
            self.reach(known, weight_version)
            return known
        # A worker that was removed and returns while old requests still run keeps counting them.
        worker = self._leaving.pop(address.url, None)
        if worker is None:
            worker = Worker(address, api_key=api_key, attributes=attributes or {}, now=self._now())
        else:
            self._update(worker, api_key, attributes)
            self._end_drain(worker)
            worker.caches.change(worker.weight_version, new_number())  # for those that still run
            worker.failures, worker.weight_version = 0, None
        self._register(worker)
        self._welcome(worker, weight_version, before=None)
        return worker

    def expect(self, address: WorkerUrl) -> Worker:
        """Register a worker that the configuration names. It takes no requests before it has answered a check, where
        checks can take a worker out."""
        if (known := self._workers.get(address.url)) is not None:
            return known
        if self._failure_threshold >= NEVER:
            return self.add(address)
        self._register(worker := Worker(address, now=self._now()))
        self._move(worker, WorkerState.UNREACHED, EXPECTED, before=None)
        return worker

    def reach(self, worker: Worker, weight_version: str | None) -> None:
        """Make a worker routable that had not answered yet; others stay what they are."""
        if self._is(worker, WorkerState.UNREACHED):
            worker.failures = 0
            self._welcome(worker, weight_version, before=worker.state)

    def _welcome(self, worker: Worker, weight_version: str | None, *, before: WorkerState | None) -> None:
        # It may come with a cache of weights that this fleet has had, or of others.
        self._weights_changed |= weight_version not in (None, self.weight_version)
        worker.caches = PrefixCaches(new_number() if self._weights_changed else 0)
        worker.weight_version, worker.missed_update = weight_version, self.unnamed_weights
        self._move(worker, WorkerState.READY, REGISTERED, before=before)
        self._settle_weights()

    def stay_unreached(self, worker: Worker, reason: str) -> None:
        """Say why a worker has not answered yet; told again only when the reason changes."""
        reason = f"{EXPECTED}: {reason}"
        if self._is(worker, WorkerState.UNREACHED) and worker.reason != reason:
            self._move(worker, WorkerState.UNREACHED, reason, before=worker.state)

    def distrust_caches(self) -> None:
        """Another router may have filled those of all workers, later ones too, with what older weights computed."""
        self._weights_changed = True
        for worker in self:
            worker.caches = PrefixCaches(new_number())

    def _update(self, worker: Worker, api_key: str | None, attributes: Mapping[str, object] | None) -> None:
        if api_key is not None:
            worker.set_key(api_key)
        if attributes:
            worker.set_attributes(attributes)
            self._publish()
        if worker.state is WorkerState.DRAINING and worker.url in self._workers:
            worker.failures = 0
            self._move(worker, WorkerState.READY, "registered again while draining", before=worker.state)
            self._end_drain(worker)

    def remove(self, worker: Worker, reason: str = "removed") -> None:
        """Forget a worker now; its requests in flight are left to finish. Removing it twice does nothing."""
        if self._workers.get(worker.url) is not worker:
            return
        del self._workers[worker.url]
        worker.serial = 0
        if not self.is_idle(worker):
            self._leaving[worker.url] = worker
        self._publish()
        self._tell(Transition(worker, worker.state, None, reason))
        self._settle_weights()

    def drain(self, worker: Worker, when_idle: Callable[[], None]) -> None:
        """Send nothing new to a worker and remove it after its last request; `when_idle` is called then, or when the
        worker is registered again before."""
        if worker.state is not WorkerState.DRAINING:
            self._move(worker, WorkerState.DRAINING, "drain requested", before=worker.state)
        self._when_idle.setdefault(worker.url, []).append(when_idle)
        if self.is_idle(worker):
            self.left(worker)

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
        """Take a slot on the unit that `policy` chooses among the routable ones, without those of `excluded` workers;
        of what `generates`, among those that may. Where all are paused, among those. Of these, those of the worker at
        the URL `preferred`, and those with this `rank`, where there are some.

        `key` names a session: while it could be sent home and is not, for this once, it stays at home there.

        Raises:
            NoWorkerAvailable: none is registered, none is routable, or all routable ones are excluded.
        """
        snapshot = self.snapshot
        at_home: Sequence[Unit] = (snapshot.generating if generates else snapshot.routable) or snapshot.paused
        candidates = at_home
        if excluded:
            candidates = snapshot.left(excluded, generates=generates)
        if not candidates:
            raise NoWorkerAvailable(why_none(self._workers.values()))
        if preferred is not None:
            candidates = [unit for unit in candidates if unit.worker.url == preferred] or candidates
        if rank is not None:
            candidates = [unit for unit in candidates if unit.rank == rank] or candidates
        return self._choose(policy, key, candidates, at_home, tokens, body)

    def lease_prefill(
        self, policy: Policy, key: str | None, excluded: Collection[Worker], tokens: int, body: bytes
    ) -> Lease:
        """The same on a unit that computes the prompt of what a decode unit answers. A key ties prompts that begin
        alike to one, beside the decode unit that it is tied to.

        Raises:
            NoWorkerAvailable: none is routable.
        """
        if not (candidates := [unit for unit in self.snapshot.prefill if unit.worker not in excluded]):
            raise NoWorkerAvailable(why_none(self._workers.values()))
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
        """A lease on one of the candidates. `at_home`: where a session stays though this request of it is elsewhere."""
        if self.admission.bounds:
            candidates = self.admission.places(key, candidates, tokens)
        known = self.homes.find(key)
        if len(candidates) == 1:
            unit = candidates[0]
        elif known is None:
            if self.let_others_choose is not None:
                self.let_others_choose(at_home)
            unit = policy.choose(candidates, placement_request((None, 0, 0, tokens, body, 0)))
        else:
            home = known.unit if known.unit in candidates else None
            request = placement_request((home, known.stayed, known.running, tokens, body, known.moved))
            try:
                unit = policy.choose(candidates, request)
            except PolicyFault:
                self.homes.stay_away(known)
                raise
        self._choices += 1
        unit.chosen_at = self._choices
        at = None if key is None else self.homes.settle(key, known, unit, candidates, at_home, tokens)
        return Lease(self, unit, tokens, at)

    def released(self, lease: Lease, *, answered: bool) -> None:
        """Its slot is given back."""
        unit, worker = lease.unit, lease.unit.worker
        unit.in_flight -= 1
        unit.tokens -= lease.tokens
        if lease.home is not None:
            self.homes.leave(lease.home, lease.tokens, answered=answered)
        worker.in_flight -= 1
        assert unit.in_flight >= 0, f"{unit!r} released more often than leased"
        if (worker.state is WorkerState.DRAINING or self._leaving) and self.is_idle(worker):
            self.left(worker)

    def left(self, worker: Worker) -> None:
        """Nobody has requests at a worker. One that gets no more is gone with that."""
        if worker.state is WorkerState.DRAINING:
            self.remove(worker, "drained")
            self._end_drain(worker)
        if self._leaving.get(worker.url) is worker:
            del self._leaving[worker.url]

    def _end_drain(self, worker: Worker) -> None:
        for call in self._when_idle.pop(worker.url, ()):
            call()

    def set_ranks(self, worker: Worker, count: int, fault: str | None = None) -> bool:
        """As `Worker.set_ranks`."""
        if changed := worker.set_ranks(count, fault):
            self._publish()
        return changed

    # Health

    def record_failure(self, worker: Worker, reason: str) -> None:
        """A probe failed or no connection could be made; the K-th in a row quarantines the worker."""
        worker.failures, worker.last_check = worker.failures + 1, self._now()
        self._forget_engine(worker)
        if self.report is not None:
            self.report("failure", worker, reason)
            return
        self.stay_unreached(worker, reason)
        if worker.failures >= self._failure_threshold and worker.state in ALIVE and self._is(worker, worker.state):
            worker.missed_update |= self.unnamed_weights  # it may start anew, with the weights of its disk
            self._move(worker, WorkerState.QUARANTINED, reason, before=worker.state)

    def _forget_engine(self, worker: Worker) -> None:
        """Who answers next may be another, with other weights; most engines say themselves which."""
        if self.report is None and worker.engine is not None and not worker.engine.tells_version:
            worker.weight_version = None
        worker.forget_engine()
        self._publish()

    def record_stall(self, worker: Worker, reason: str) -> None:
        """Its engine stands still: it is out until it passes its checks, and keeps this reason while it is silent. Each
        process that has requests there sees it for itself; the first one counts."""
        if worker.stalled:
            return
        self.stalls += 1
        if worker.state is not WorkerState.DRAINING and self._workers.get(worker.url) is worker:
            self._move(worker, WorkerState.QUARANTINED, reason, before=worker.state)
        worker.stalled = True
        if self.report is not None:
            self.report("stall", worker, reason)

    def record_alive(self, worker: Worker, weight_version: str | None) -> None:
        """The cheap probe passed; failures start from zero again. A quarantined worker needs `readmit` besides."""
        worker.failures, worker.last_check = 0, self._now()
        if weight_version is not None and weight_version != worker.weight_version:
            before = self.weight_version if worker.weight_version is None else worker.weight_version
            if before not in (None, weight_version):  # changed behind the router, perhaps before it came
                self._change_caches([worker])
                worker.missed_update = self.unnamed_weights = False  # weights have a name again
            worker.weight_version = weight_version
            self._settle_weights()

    @contextmanager
    def changing_weights(self) -> Iterator[None]:
        """Within this, what probes hear of weight versions is neither the old fleet nor the new one, and caches are
        neither of the old weights nor of the new ones. An update that was refused may have taken effect."""
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
        """Somebody has given new weights to workers that do not say it themselves."""
        self._change_caches(workers)
        self.updated(workers, version)

    def updated(self, workers: Collection[Worker], version: str | None, *, took: bool = True) -> None:
        """Note that `workers` took an update of the weights to this version (None: it named none), or were only told
        its name. Under `same-weights` the others take no traffic until they have taken one."""
        self.weight_version, self.unnamed_weights = version, version is None
        for worker in self:
            worker.missed_update = (version is None or worker.missed_update) and not (took and worker in workers)
        for worker in workers if version is not None else ():
            worker.weight_version = version
        self._settle_weights()

    def set_paused(self, worker: Worker, reason: str) -> None:
        """A worker answers and does not generate."""
        if worker.state is not WorkerState.PAUSED and worker.state in ALIVE and self._is(worker, worker.state):
            self._move(worker, WorkerState.PAUSED, reason, before=worker.state)

    def set_unpaused(self, worker: Worker) -> None:
        """A worker that was paused goes on."""
        if self._is(worker, WorkerState.PAUSED):
            self._move(worker, WorkerState.READY, "goes on", before=worker.state)
            self._settle_weights()

    def readmission_refused(self, worker: Worker) -> str | None:
        """Why policy keeps a recovered worker out, or None if it may return."""
        if self._readmit == "never":
            return "the readmission policy is 'never': remove and add the worker"
        same = self._readmit == "same-weights"
        return other_weights(worker, self.weight_version, must_say=True) if same else None

    def readmit(self, worker: Worker, reason: str) -> bool:
        """Make a recovered worker routable again if policy agrees. Says whether it is."""
        if not self._is(worker, WorkerState.QUARANTINED) or self.readmission_refused(worker):
            return False
        self._move(worker, WorkerState.READY, reason, before=worker.state)
        self._settle_weights()
        return True

    def keep_out(self, worker: Worker, reason: str) -> None:
        """Say why a worker that answers stays quarantined; told again only when the reason changes."""
        if self._is(worker, WorkerState.QUARANTINED) and worker.reason != reason:
            self._move(worker, WorkerState.QUARANTINED, reason, before=worker.state)

    def _is(self, worker: Worker, state: WorkerState) -> bool:
        return worker.state is state and self._workers.get(worker.url) is worker

    def _settle_weights(self) -> None:
        """Bring the fleet's version and the workers' states in step. A worker that leaves takes its vote with it."""
        if self._settling or self.report is not None:
            return
        self._settling = True
        try:
            self._count_versions()
            while self._readmit == "same-weights" and self._sort_one_by_weights():
                self._count_versions()
        finally:
            self._settling = False

    def _count_versions(self) -> None:
        if not self.unnamed_weights:
            self.weight_version = voted_version(self, self.weight_version, routable=bool(self.snapshot.routable))

    def _sort_one_by_weights(self) -> bool:
        """Under `same-weights`, who has other weights than the fleet takes no traffic until that is over. Says whether
        somebody moved."""
        for worker in self:
            reason = other_weights(worker, self.weight_version)
            before = WorkerState.OUTDATED if reason is None else WorkerState.READY
            if worker.state is before:
                after = WorkerState.READY if reason is None else WorkerState.OUTDATED
                self._move(worker, after, reason or f"has weight version {worker.weight_version!r}", before=before)
                return True
        return False

    # Transitions

    def _move(self, worker: Worker, state: WorkerState, reason: str, *, before: WorkerState | None) -> None:
        worker.state, worker.reason, worker.since, worker.stalled = state, reason, self._now(), False
        self._publish()
        self._tell(Transition(worker, before, state, reason))
        self._settle_weights()
