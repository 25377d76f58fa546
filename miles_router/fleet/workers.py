"""The records of workers, one for each engine server, and of the units that requests are counted on. Pure."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from miles_router.fleet.caches import PrefixCaches
from miles_router.fleet.worker_url import WorkerUrl

logger = logging.getLogger(__name__)

if TYPE_CHECKING:  # the settings import this module, and `--help` should not load the engine code
    from miles_router.engines.engine import Engine
    from miles_router.engines.facts import Facts
    from miles_router.fleet.worker_table import PaceMeasurements


class WorkerState(str, Enum):
    """The state of a worker. New requests go only to READY workers."""

    READY = "ready"
    QUARANTINED = "quarantined"
    OUTDATED = "outdated"
    PAUSED = "paused"
    DRAINING = "draining"
    #: Configured, but has not answered yet.
    UNREACHED = "unreached"


class Role(str, Enum):
    """The part of a generation that a worker computes."""

    REGULAR = "regular"
    #: The prompt and the first token.
    PREFILL = "prefill"
    #: All further tokens; the decode worker sends the reply.
    DECODE = "decode"


#: Members that each request is compared with. Until Python 3.12, `Role.DECODE` costs fifty times as much as `DECODE`.
DECODE, DRAINING = Role.DECODE, WorkerState.DRAINING
#: States of workers that answer.
ALIVE = frozenset({WorkerState.READY, WorkerState.OUTDATED, WorkerState.PAUSED})


#: Reasons of states: the worker was registered, or only configured.
REGISTERED, EXPECTED = "registered", "named in the configuration, and has not answered yet"

#: The attributes that make a worker one half of a pair.
ROLE, BOOTSTRAP_PORT = "worker_type", "bootstrap_port"
#: The attribute of a worker that discovery added: the source that lists it.
DISCOVERED = "discovered"


class Pulse:
    """A count of the reply pieces that a worker's engine has sent, as a sign that it works."""

    __slots__ = ("last_piece_at", "pieces")

    def __init__(self) -> None:
        self.pieces = 0
        #: When the last piece arrived, on the event loop's clock.
        self.last_piece_at = -math.inf


class WorkerActivity(NamedTuple):
    """The facts that show whether a worker still works though it did not answer a check in time."""

    #: Seconds since the last piece of a reply arrived from its engine.
    silent_seconds: float
    #: Whether a request is running on it.
    has_requests: bool


class Unit:
    """A part of a worker that generates on its own, to which requests are sent and on which they are counted.

    A worker is one unit, or one unit for each of its data-parallel ranks.
    """

    __slots__ = (
        "chosen_at",
        "idle_sessions",
        "in_flight",
        "measurements",
        "pace",
        "rank",
        "retired",
        "sessions",
        "tokens",
        "worker",
    )  # fmt: skip

    def __init__(self, worker: Worker, rank: int | None = None) -> None:
        self.worker = worker
        #: The rank's number; None for the whole worker.
        self.rank = rank
        self.in_flight = 0
        #: Tokens of the prompts in flight, and of idle sessions at home here.
        self.tokens = 0
        #: Sessions at home here that have not ended.
        self.sessions = 0
        #: Sessions among these without a request in flight, as far as this process has served them.
        self.idle_sessions = 0
        #: Seconds per output token relative to other units; 1 until measurements show that the unit is slower.
        self.pace = 1.0
        #: The measurements behind `pace`.
        self.measurements: PaceMeasurements | None = None
        #: The sequence number of the choice that chose this unit last.
        self.chosen_at = 0
        #: Whether the worker's units were replaced by others. Requests in flight on this unit finish.
        self.retired = False

    @property
    def capacity(self) -> int | None:
        """Size of the KV cache in tokens, as the engine reports or last reported it; None if unknown."""
        facts = self.worker.facts
        return self.worker.last_capacity if facts is None else facts.token_capacity

    def __repr__(self) -> str:
        return f"<Unit {self.rank} of {self.worker!r}>"


class Worker:
    """The record of one engine server. Mutable on purpose; only the pool and the fleet write to it."""

    __slots__ = (
        "adapters",
        "address",
        "api_key",
        "applies_adapters",
        "asked",
        "attributes",
        "bootstrap_port",
        "caches",
        "engine",
        "facts",
        "facts_of",
        "failures",
        "in_flight",
        "last_capacity",
        "last_check",
        "missed_update",
        "pulse",
        "rank_fault",
        "reason",
        "role",
        "serial",
        "since",
        "stalled",
        "state",
        "units",
        "url",
        "vouched",
        "weight_version",
        "withholds_adapters",
    )

    def __init__(
        self,
        address: WorkerUrl,
        *,
        api_key: str | None = None,
        attributes: Mapping[str, object] | None = None,
        now: float = 0.0,
    ) -> None:
        self.address = address
        self.url = address.url
        self.api_key = api_key
        #: The number of its registration in the pool; 0 while it is not registered.
        self.serial = 0
        self.attributes: dict[str, object] = {}
        self.set_attributes(attributes or {})
        self.units: tuple[Unit, ...] = (Unit(self),)
        #: Leases held on its units, including retired ones.
        self.in_flight = 0
        #: Why requests are not sent to its ranks although it has several; None if they are.
        self.rank_fault: str | None = None
        self.state = WorkerState.READY
        self.reason = REGISTERED
        self.since = now
        self.failures = 0
        self.weight_version: str | None = None
        #: Whether it missed the last update of the fleet's weights, an update without a version.
        self.missed_update = False
        #: Whether this engine process has had the fleet's weights while it took requests.
        self.vouched = False
        self.last_check: float | None = None
        self.pulse = Pulse()
        self.caches = PrefixCaches()
        #: Whether it is quarantined because its engine stalled.
        self.stalled = False
        #: The facts that its engine process reported, and that process's number. They are stale once another process
        #: answers at the URL; `Fleet.facts` checks this.
        self.facts: Facts | None = None
        self.facts_of: int | None = None
        #: Whether a question for its facts has ever completed, answered or not.
        self.asked = False
        #: Whether it applies LoRA adapters, and the adapters it last reported; None while unknown.
        self.applies_adapters: bool | None = None
        self.adapters: frozenset[str] | None = None
        #: Whether it refused the router's question for its adapters: it has a key that the router was not given.
        self.withholds_adapters = False
        #: The KV cache size of a unit, in tokens, of the engine process that was forgotten last.
        self.last_capacity: int | None = None
        #: The kind of engine; None until it is known. `Fleet.engine` asks for it.
        self.engine: Engine | None = None

    def set_attributes(self, attributes: Mapping[str, object]) -> None:
        """Replace the attributes given at registration. Role and bootstrap port stay unless new ones are given."""
        role = {name: self.attributes[name] for name in (ROLE, BOOTSTRAP_PORT) if name in self.attributes}
        self.attributes = {**role, **attributes}
        self.role = Role(self.attributes.get(ROLE, Role.REGULAR))
        port = self.attributes.get(BOOTSTRAP_PORT)
        #: The port on which the other worker of a prefill/decode pair connects to it.
        self.bootstrap_port = port if isinstance(port, int) else None

    def set_key(self, api_key: str) -> bool:
        """Use this API key from now on, and return True if it is new.

        The engine's facts are then forgotten, because the engine may report more to the new key.
        """
        if api_key == self.api_key:
            return False
        self.api_key, self.withholds_adapters = api_key, False
        self.forget_engine()
        return True

    def __repr__(self) -> str:
        return f"<Worker {self.url} {self.state.value}, in flight: {self.in_flight}, failures: {self.failures}>"

    def forget_engine(self) -> None:
        """Forget the engine, because another process may answer at this address from now on."""
        self.last_capacity, self.vouched = self.units[0].capacity, False
        self.facts, self.engine, self.applies_adapters = None, None, None
        for unit in self.units:
            unit.pace, unit.measurements = 1.0, None

    @property
    def ranks(self) -> tuple[Unit, ...]:
        """The units if they are ranks; empty if the worker is one unit."""
        return self.units if len(self.units) > 1 else ()

    def set_ranks(self, count: int, fault: str | None = None) -> bool:
        """Count requests on each of `count` ranks from now on, or on the whole worker if `count` is 1.

        Args:
            fault: why requests are not sent to the ranks although the worker has several.

        Returns:
            True if the number of units changed.
        """
        self.rank_fault = fault
        if len(self.units) == count:
            return False
        for unit in self.units:
            unit.retired = True
        self.units = tuple(Unit(self, rank) for rank in range(count)) if count > 1 else (Unit(self),)
        return True

    def describe(self) -> dict[str, object]:
        """Return the worker's entry of `GET /workers`, without its API key; times are Unix seconds."""
        ranks = [{"rank": unit.rank, **_load(unit)} for unit in self.ranks]
        return {
            "id": self.address.id,
            "url": self.url,
            "state": self.state.value,
            "reason": self.reason,
            "since": self.since,
            **_load(*self.units),
            "in_flight": self.in_flight,
            "weight_version": self.weight_version,
            "failures": self.failures,
            "last_check": self.last_check,
            **({"ranks": ranks} if ranks else {}),
            **({"rank_fault": self.rank_fault} if self.rank_fault else {}),
            **({"lacks": list(self.facts.lacks)} if self.facts is not None and self.facts.lacks else {}),
            **self.attributes,
        }


def _load(*units: Unit) -> dict[str, object]:
    return {name: sum(getattr(unit, name) for unit in units) for name in ("in_flight", "sessions", "tokens")}


class RankFault:
    """The reason why requests are not sent to the ranks of one engine process, kept together with its facts."""

    def __init__(self) -> None:
        self.reason: str | None = None


class Transition:
    """A change of a worker's state, passed once to each listener."""

    __slots__ = ("after", "before", "reason", "worker")

    def __init__(self, worker: Worker, before: WorkerState | None, after: WorkerState | None, reason: str) -> None:
        self.worker = worker
        self.before = before  # None: newly registered
        self.after = after  # None: removed
        self.reason = reason

    def log(self) -> None:
        after = self.after.value if self.after else "removed"
        in_order = self.before is None or self.after in (None, WorkerState.READY, WorkerState.DRAINING)
        level = logging.INFO if in_order else logging.WARNING
        logger.log(level, f"worker_{after}", extra={"fields": {"worker": self.worker.url, "reason": self.reason}})


def other_weights(worker: Worker, version: str | None, *, must_say: bool = False) -> str | None:
    """Return why a worker's weights differ from the fleet's, or None if they may be the same.

    Args:
        version: the fleet's weight version; None if unknown.
        must_say: a worker that reports no version counts as different. A discovered worker always does: its engine may
            have started with the weights from its disk, and no program has vouched for it.
    """
    must_say |= DISCOVERED in worker.attributes
    if worker.missed_update:
        return "it missed the fleet's last weight update, which named no version"
    if version is not None and worker.weight_version not in ((version,) if must_say else (None, version)):
        return f"its weight version {worker.weight_version!r} differs from the fleet's {version!r}"
    return None


def voted_version(workers: Iterable[Worker], version: str | None, routable: bool, updated: bool) -> str | None:
    """Return the fleet's weight version: the version of most workers that answer, or `version` on a tie.

    While no worker is routable, all workers vote and only a unanimous vote changes the version. Otherwise one restarted
    worker could decide for all. Once the fleet was `updated`, discovered workers that have not had its weights
    have no vote: ten new engines with weights from the disk must not outvote two trained ones.
    """
    voters = [worker for worker in workers if worker.state in ALIVE or not routable]
    if updated:
        voters = [worker for worker in voters if worker.vouched or DISCOVERED not in worker.attributes]
    votes = Counter(worker.weight_version for worker in voters if worker.weight_version is not None)
    if not votes or (not routable and len(votes) > 1):
        return version
    most = max(votes.values())
    if version is not None and votes[version] == most:
        return version
    return next(each for each, count in votes.items() if count == most)
