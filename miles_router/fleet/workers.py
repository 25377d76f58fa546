"""Workers: one record for each SGLang server, and the unit that requests are counted on. Pure."""

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

if TYPE_CHECKING:  # the settings come by here, and a command that shows its help does without the engine's wire
    from miles_router.engines.engine import Engine
    from miles_router.engines.facts import Facts
    from miles_router.fleet.placement.paces import Learned


class WorkerState(str, Enum):
    """Only READY workers are chosen for new requests."""

    READY = "ready"
    QUARANTINED = "quarantined"
    OUTDATED = "outdated"
    PAUSED = "paused"
    DRAINING = "draining"
    #: Named in the configuration, and has not answered yet.
    UNREACHED = "unreached"


class Role(str, Enum):
    """What part of a generation a worker does."""

    REGULAR = "regular"
    #: The prompt and the first token.
    PREFILL = "prefill"
    #: All further tokens, and the answer.
    DECODE = "decode"


#: States of workers that answer.
ALIVE = frozenset({WorkerState.READY, WorkerState.OUTDATED, WorkerState.PAUSED})


#: Why a worker is what it is: it has joined, or it is expected to.
REGISTERED, EXPECTED = "registered", "named in the configuration, and has not answered yet"

#: The attributes that make a worker one half of a pair.
ROLE, BOOTSTRAP_PORT = "worker_type", "bootstrap_port"


class Pulse:
    """Counts what a worker's engine is heard to do: pieces of answers to requests that it works on."""

    __slots__ = ("beats", "heard_at")

    def __init__(self) -> None:
        self.beats = 0
        #: When the last one came, on the event loop's clock.
        self.heard_at = -math.inf


class Signs(NamedTuple):
    """What speaks for a worker that did not answer a check in time."""

    #: Seconds since a piece of an answer came from its engine.
    heard: float
    #: Whether a request waits for its engine.
    runs: bool


class Unit:
    """What one request is sent to, and what it is counted on: the part of a worker that generates on its own. A worker
    is one unit, or one for each of its ranks."""

    __slots__ = (
        "away", "chosen_at", "in_flight", "learned", "pace", "rank", "retired", "sessions", "tokens", "worker",
    )  # fmt: skip

    def __init__(self, worker: Worker, rank: int | None = None) -> None:
        self.worker = worker
        #: None: the whole worker.
        self.rank = rank
        self.in_flight = 0
        #: Of the prompts in flight, and of sessions that will come back.
        self.tokens = 0
        #: That are at home here and are not over, as far as anybody knows.
        self.sessions = 0
        #: Of these, those that this process has seen and of which nothing runs.
        self.away = 0
        #: How many times as long as elsewhere its answers take for each token: 1 while nothing says that it is slower.
        self.pace = 1.0
        #: What that is known by.
        self.learned: Learned | None = None
        #: When it was chosen last, as the number of that choice.
        self.chosen_at = 0
        #: It is no part of its worker any more, which has others. What it has is left to finish.
        self.retired = False

    @property
    def capacity(self) -> int | None:
        """Tokens whose keys and values it has memory for, as its engine says, or said before it was lost."""
        facts = self.worker.facts
        return self.worker.last_capacity if facts is None else facts.token_capacity

    def __repr__(self) -> str:
        return f"<Unit {self.rank} of {self.worker!r}>"


class Worker:
    """One SGLang server. Mutable on purpose; only the pool and the fleet write to it."""

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
        "weight_version",
        "withholds",
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
        #: The number of its registration in its pool; 0 while it is not registered.
        self.serial = 0
        self.attributes: dict[str, object] = {}
        self.set_attributes(attributes or {})
        self.units: tuple[Unit, ...] = (Unit(self),)
        #: Leases held on its units, retired ones included.
        self.in_flight = 0
        #: Why its ranks are not chosen, where they could be.
        self.rank_fault: str | None = None
        self.state = WorkerState.READY
        self.reason = REGISTERED
        self.since = now
        self.failures = 0
        self.weight_version: str | None = None
        #: It did not take the last update of the fleet's weights, which named no version.
        self.missed_update = False
        self.last_check: float | None = None
        self.pulse = Pulse()
        self.caches = PrefixCaches()
        #: It is out since its engine stood still.
        self.stalled = False
        #: What its engine said about itself, and the number of the process that did. Only the fleet knows whether that
        #: one still answers: ask `Fleet.facts`.
        self.facts: Facts | None = None
        self.facts_of: int | None = None
        #: Whether its engine was ever asked, and had its time to answer.
        self.asked = False
        #: Whether it applies adapters, once it has said so, and those that it said last it has.
        self.applies_adapters: bool | None = None
        self.adapters: frozenset[str] | None = None
        #: Whether it says so to some clients alone, for it has a key that it was not registered with.
        self.withholds = False
        #: The memory of a unit, in tokens, of the engine that was forgotten last.
        self.last_capacity: int | None = None
        #: The kind of engine that it is; None until that is known. `Fleet.engine` asks.
        self.engine: Engine | None = None

    def set_attributes(self, attributes: Mapping[str, object]) -> None:
        """What was said of it at its registration. One half of a pair stays that unless it says otherwise."""
        role = {name: self.attributes[name] for name in (ROLE, BOOTSTRAP_PORT) if name in self.attributes}
        self.attributes = {**role, **attributes}
        self.role = Role(self.attributes.get(ROLE, Role.REGULAR))
        port = self.attributes.get(BOOTSTRAP_PORT)
        #: Where the other half of a pair meets it.
        self.bootstrap_port = port if isinstance(port, int) else None

    def set_key(self, api_key: str) -> None:
        """The key that it has to be asked with from now on. To another one it may say more."""
        if api_key != self.api_key:
            self.api_key, self.withholds = api_key, False
            self.forget_engine()

    def __repr__(self) -> str:
        return f"<Worker {self.url} {self.state.value}, in flight: {self.in_flight}, failures: {self.failures}>"

    def forget_engine(self) -> None:
        """Another one may be there from now on."""
        self.last_capacity = self.units[0].capacity
        self.facts, self.engine, self.applies_adapters = None, None, None
        for unit in self.units:
            unit.pace, unit.learned = 1.0, None

    @property
    def ranks(self) -> tuple[Unit, ...]:
        """Its units, where each of them is a rank."""
        return self.units if len(self.units) > 1 else ()

    def set_ranks(self, count: int, fault: str | None = None) -> bool:
        """Count requests on each of so many ranks from now on; with 1, on the worker. Says whether that is new.

        Args:
            fault: why the ranks that it has are not chosen.
        """
        self.rank_fault = fault
        if len(self.units) == count:
            return False
        for unit in self.units:
            unit.retired = True
        self.units = tuple(Unit(self, rank) for rank in range(count)) if count > 1 else (Unit(self),)
        return True

    def describe(self) -> dict[str, object]:
        """What `GET /workers` shows; times are Unix seconds. The api key stays here."""
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
    """Why the ranks of one engine process are not chosen, if they are not. Kept with its facts, and gone with them."""

    def __init__(self) -> None:
        self.reason: str | None = None


class Transition:
    """One change of a worker's state, told once to whoever listens."""

    __slots__ = ("after", "before", "reason", "worker")

    def __init__(self, worker: Worker, before: WorkerState | None, after: WorkerState | None, reason: str) -> None:
        self.worker = worker
        self.before = before  # None: newly registered
        self.after = after  # None: removed
        self.reason = reason

    def log(self) -> None:
        """Write one line, with the reason."""
        after = self.after.value if self.after else "removed"
        in_order = self.before is None or self.after in (None, WorkerState.READY, WorkerState.DRAINING)
        level = logging.INFO if in_order else logging.WARNING
        logger.log(level, f"worker_{after}", extra={"fields": {"worker": self.worker.url, "reason": self.reason}})


def other_weights(worker: Worker, version: str | None, *, must_say: bool = False) -> str | None:
    """Return why a worker's weights are not those of a fleet with this version (None: it is unknown); None if they may
    be. `must_say`: a worker that names no version has others."""
    if worker.missed_update:
        return "it did not take the fleet's last update, which named no weight version"
    if version is not None and worker.weight_version not in ((version,) if must_say else (None, version)):
        return f"its weight version {worker.weight_version!r} differs from the fleet's {version!r}"
    return None


def voted_version(workers: Iterable[Worker], version: str | None, *, routable: bool) -> str | None:
    """The weight version of a fleet that had this one: what most workers that answer hold. A tie changes nothing; with
    nobody `routable` only a unanimous fleet may change it, so that one restarted worker cannot speak for all."""
    voters = [worker for worker in workers if worker.state in ALIVE or not routable]
    votes = Counter(worker.weight_version for worker in voters if worker.weight_version is not None)
    if not votes or (not routable and len(votes) > 1):
        return version
    most = max(votes.values())
    if version is not None and votes[version] == most:
        return version
    return next(each for each, count in votes.items() if count == most)
