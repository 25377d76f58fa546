"""The series of `GET /router/run`: tokens sampled and trained, turns and waits, by interval and by weight version.

Middlewares that record generations feed it. A bounded number of intervals is kept. Each interval begins at a multiple
of `INTERVAL` on the clock, so that the intervals of several processes can be added up.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles_router.fleet.pool import WorkerPool

#: Seconds of an interval; how many non-empty intervals are kept; of how many weight versions totals are kept.
INTERVAL, INTERVALS, VERSIONS = 10, 720, 64
#: The most keys of one counter; further keys count as `OTHER`.
NAMES = 32
UNKNOWN, OTHER = "unknown", "other"
#: Rewards with a larger absolute value are ignored, so that the sums stay finite and can be written as JSON.
LARGEST_REWARD = 1e15
#: Tokens by the weight version that sampled them; the key None for an unknown version.
ByVersion = Mapping["str | None", int]


@dataclass
class RunCounts:
    """The counts since `start` (Unix seconds) while the fleet had this weight version."""

    start: float
    weight_version: str | None
    sampled: Counter[str] = field(default_factory=Counter)
    evaluated: Counter[str] = field(default_factory=Counter)
    given: int = 0
    reused: int = 0
    prompt: int = 0
    cached: int = 0
    trained: Counter[str] = field(default_factory=Counter)
    staleness: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    forks: Counter[str] = field(default_factory=Counter)
    waited_s: float = 0.0
    waits: int = 0

    def interval(self) -> dict[str, Any]:
        """Return the counts as `GET /router/run` shows an interval."""
        return {**vars(self), "start": int(self.start), "waited_s": round(self.waited_s, 6)}

    def total(self) -> dict[str, Any]:
        """Return the counts as `GET /router/run` shows the totals of a weight version."""
        shown = {name: value for name, value in self.interval().items() if name not in ("start", "staleness")}
        sums = {"sampled": self.sampled.total(), "evaluated": self.evaluated.total(), "trained": self.trained.total()}
        return {**shown, "since": self.start, **sums}


@dataclass
class Rewards:
    """The rewards of samples whose last token one weight version sampled."""

    count: int = 0
    sum: float = 0.0


class RunSeries:
    """The series of a run. Its methods are thread-safe, since samples are built in threads.

    Args:
        version: returns the fleet's weight version.
        now: returns Unix seconds.
    """

    def __init__(self, version: Callable[[], str | None], now: Callable[[], float] = time.time) -> None:
        self._version = version
        self._now = now
        self._lock = Lock()
        self._intervals: deque[RunCounts] = deque(maxlen=INTERVALS)
        self._totals: OrderedDict[str | None, RunCounts] = OrderedDict()
        self._rewards: OrderedDict[str | None, Rewards] = OrderedDict()
        self._evaluations: OrderedDict[str | None, Rewards] = OrderedDict()
        #: The time since which all intervals are kept.
        self._since = now() // INTERVAL * INTERVAL

    @classmethod
    def of(cls, pool: WorkerPool) -> RunSeries:
        """Return the series of a run whose fleet this is."""
        return cls(lambda: pool.weight_version)

    def record(
        self, sampled: ByVersion, *, given: int, reused: int, cached: object = None, reason: str | None = None
    ) -> None:
        """Count a recorded turn.

        Args:
            sampled: its sampled tokens.
            given: new tokens of its prompt.
            reused: prompt tokens that repeat recorded ones.
            cached: prompt tokens that the engine reports as found in its prefix cache; ignored if not an int.
            reason: why the turn forks, or None if it does not.
        """
        with self._lock:
            for counts in self._current():
                counts.turns += 1
                counts.given += given
                counts.reused += reused
                if type(cached) is int:
                    counts.prompt += given + reused
                    counts.cached += cached
                for version, tokens in sampled.items():
                    _add(counts.sampled, UNKNOWN if version is None else version, tokens)
                if reason is not None:
                    _add(counts.forks, reason, 1)

    def evaluate(self, sampled: ByVersion) -> None:
        """Count the sampled tokens of a recorded turn of an evaluation. They count nowhere else."""
        with self._lock:
            for counts in self._current():
                for version, tokens in sampled.items():
                    _add(counts.evaluated, UNKNOWN if version is None else version, tokens)

    def train(self, trained: ByVersion) -> None:
        """Count the tokens in the loss of samples that are read for the first time."""
        with self._lock:
            fleet = self._version()
            for counts in self._current():
                for version, tokens in trained.items():
                    _add(counts.trained, UNKNOWN if version is None else version, tokens)
                    _add(counts.staleness, _lag(version, fleet), tokens)

    def reward(self, version: str | None, reward: object, *, evaluation: bool = False) -> None:
        """Count the reward of a sample whose last token was sampled by this weight version (None: unknown). Those of
        evaluations are a series of their own.

        Rewards that are not numbers between -`LARGEST_REWARD` and `LARGEST_REWARD` are ignored.
        """
        if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not abs(reward) <= LARGEST_REWARD:
            return
        with self._lock:
            series = self._evaluations if evaluation else self._rewards
            if version not in series:
                series[version] = Rewards()
                if len(series) > VERSIONS:
                    series.popitem(last=False)
            rewards = series[version]
            rewards.count += 1
            rewards.sum += reward

    def wait(self, seconds: float) -> None:
        """Count a generation's wait at the gate or for room."""
        with self._lock:
            for counts in self._current():
                counts.waits += 1
                counts.waited_s += seconds

    def describe(self) -> dict[str, Any]:
        """Return the JSON of `GET /router/run`."""
        with self._lock:
            return {
                "interval_s": INTERVAL,
                "now": self._now(),
                "since": int(self._since),
                "weight_version": self._version(),
                "intervals": [each.interval() for each in self._intervals],
                "versions": [each.total() for each in self._totals.values()],
                "rewards": _listed(self._rewards),
                "evaluations": _listed(self._evaluations),
            }

    def _current(self) -> tuple[RunCounts, RunCounts]:
        """Return the present interval, and the totals of the fleet's weight version."""
        now, version = self._now(), self._version()
        return self._interval(now, version), self._total(now, version)

    def _interval(self, now: float, version: str | None) -> RunCounts:
        start = now // INTERVAL * INTERVAL
        for known in reversed(self._intervals):
            if known.start < start:
                break
            if known.weight_version == version:  # a later interval matches too if the clock was set back
                return known
        if len(self._intervals) == INTERVALS:
            self._since = self._intervals[0].start + INTERVAL
        self._intervals.append(RunCounts(max(start, self._intervals[-1].start) if self._intervals else start, version))
        return self._intervals[-1]

    def _total(self, now: float, version: str | None) -> RunCounts:
        if version not in self._totals:
            self._totals[version] = RunCounts(now, version)
            if len(self._totals) > VERSIONS:
                self._totals.popitem(last=False)
        return self._totals[version]


def _listed(rewards: Mapping[str | None, Rewards]) -> list[dict[str, Any]]:
    return [{"weight_version": version, **vars(each)} for version, each in rewards.items()]


def _add(counts: Counter[str], name: str, number: int) -> None:
    counts[name if name in counts or len(counts) < NAMES else OTHER] += number


def _lag(version: str | None, fleet: str | None) -> str:
    """Return how many versions the fleet is ahead of this one, or `UNKNOWN`."""
    if version is None or fleet is None or not (version.isdecimal() and fleet.isdecimal()):
        return UNKNOWN
    lag = int(fleet) - int(version)
    return str(lag) if lag >= 0 else UNKNOWN
