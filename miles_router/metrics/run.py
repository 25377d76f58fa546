"""What a run has sampled, trained and lost, in intervals and by weight version, for `GET /router/run`.

Layers that record generations tell it; a bounded ring of intervals is what is kept. An interval begins with a whole
multiple of `INTERVAL` on the clock, so that those of several processes can be added up.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

#: Seconds of an interval, how many are kept in which something happened, and of how many weight versions the sums are.
INTERVAL, INTERVALS, VERSIONS = 10, 720, 64
#: Names by which the tokens of one interval are told apart; further ones are `OTHER`.
NAMES = 32
UNKNOWN, OTHER = "unknown", "other"
#: Rewards beyond it are not added up: sums stay numbers that JSON has.
LARGEST_REWARD = 1e15
#: Tokens by the weight version that sampled them; None: nobody says.
ByVersion = Mapping["str | None", int]


@dataclass
class RunCounts:
    """What was counted since `start` (Unix seconds) while the fleet had this weight version."""

    start: float
    weight_version: str | None
    sampled: Counter[str] = field(default_factory=Counter)
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
        """As an interval is shown."""
        return {**vars(self), "start": int(self.start), "waited_s": round(self.waited_s, 6)}

    def total(self) -> dict[str, Any]:
        """As the sums of a weight version are shown."""
        shown = {name: value for name, value in self.interval().items() if name not in ("start", "staleness")}
        return {**shown, "since": self.start, "sampled": self.sampled.total(), "trained": self.trained.total()}


@dataclass
class Rewards:
    """The rewards of samples that one weight version has ended."""

    count: int = 0
    sum: float = 0.0


class RunSeries:
    """What layers tell. Samples are made in threads, so that each may.

    Args:
        version: the fleet's weight version.
        now: Unix seconds.
    """

    def __init__(self, version: Callable[[], str | None], now: Callable[[], float] = time.time) -> None:
        self._version = version
        self._now = now
        self._lock = Lock()
        self._intervals: deque[RunCounts] = deque(maxlen=INTERVALS)
        self._totals: OrderedDict[str | None, RunCounts] = OrderedDict()
        self._rewards: OrderedDict[str | None, Rewards] = OrderedDict()
        #: All intervals from here on are kept.
        self._since = now() // INTERVAL * INTERVAL

    def record(
        self, sampled: ByVersion, *, given: int, reused: int, cached: object = None, reason: str | None = None
    ) -> None:
        """A turn is recorded.

        Args:
            sampled: how many tokens were.
            given: tokens of its prompt that are new.
            reused: those that were given again as they were recorded.
            cached: of both, what the engine found in its prefix cache, as it says; whatever is no number says nothing.
            reason: why it is a fork, if it is one.
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

    def train(self, trained: ByVersion) -> None:
        """So many tokens are in the loss of samples that somebody reads now, for the first time."""
        with self._lock:
            fleet = self._version()
            for counts in self._current():
                for version, tokens in trained.items():
                    _add(counts.trained, UNKNOWN if version is None else version, tokens)
                    _add(counts.staleness, _lag(version, fleet), tokens)

    def reward(self, version: str | None, reward: object) -> None:
        """Count the reward of a sample whose last token this weight version has sampled (None: nobody says). What is
        no number between -`LARGEST_REWARD` and that does not count."""
        if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not abs(reward) <= LARGEST_REWARD:
            return
        with self._lock:
            if version not in self._rewards:
                self._rewards[version] = Rewards()
                if len(self._rewards) > VERSIONS:
                    self._rewards.popitem(last=False)
            rewards = self._rewards[version]
            rewards.count += 1
            rewards.sum += reward

    def wait(self, seconds: float) -> None:
        """A generation has waited so long, at the gate or for room."""
        with self._lock:
            for counts in self._current():
                counts.waits += 1
                counts.waited_s += seconds

    def describe(self) -> dict[str, Any]:
        """For `GET /router/run`."""
        with self._lock:
            return {
                "interval_s": INTERVAL,
                "now": self._now(),
                "since": int(self._since),
                "weight_version": self._version(),
                "intervals": [each.interval() for each in self._intervals],
                "versions": [each.total() for each in self._totals.values()],
                "rewards": [{"weight_version": version, **vars(each)} for version, each in self._rewards.items()],
            }

    def _current(self) -> tuple[RunCounts, RunCounts]:
        """The interval, and the sums of the fleet's weight version."""
        now, version = self._now(), self._version()
        return self._interval(now, version), self._total(now, version)

    def _interval(self, now: float, version: str | None) -> RunCounts:
        start = now // INTERVAL * INTERVAL
        for known in reversed(self._intervals):
            if known.start < start:
                break
            if known.weight_version == version:  # or later, where the clock was set back
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


def _add(counts: Counter[str], name: str, number: int) -> None:
    counts[name if name in counts or len(counts) < NAMES else OTHER] += number


def _lag(version: str | None, fleet: str | None) -> str:
    """How many versions the fleet is ahead."""
    if version is None or fleet is None or not (version.isdecimal() and fleet.isdecimal()):
        return UNKNOWN
    lag = int(fleet) - int(version)
    return str(lag) if lag >= 0 else UNKNOWN
