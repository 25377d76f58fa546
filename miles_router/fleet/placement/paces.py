"""An estimate of each unit's speed: its seconds per output token compared with all units of the pool. Pure.

Seconds per token include prompts and queues at the engine, so they vary within one unit too. The estimate therefore
also learns the variance, and calls a unit slower only when chance does not explain the difference.

A unit that is called slower gets fewer requests, down to none, and then no answer could correct the estimate. So the
verdict expires after a long silence of the unit. If the next answers are slow again, the new verdict lasts twice as
long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import exp, log

from miles_router.fleet.workers import Unit

#: Window of the running means in answers: of all units, and of one unit.
ALL, ONE = 50, 16
OF_ALL, OF_ONE = 1 / ALL, 1 / ONE
#: Priors, in answers: a unit begins with 2 at the common pace; the variance begins with 8 of variance 1, a factor of e.
BEGINNING, SPREADING = 2, 8
#: Answers with fewer tokens measure the prompt rather than the unit; larger token counts are not plausible.
FEWEST, MOST = 16, 1_000_000
#: The largest deviation from the mean that one answer counts with, as a logarithm: the engine may have been paused.
FURTHEST = 1.5
#: Answers of a unit before it can be called slower.
FIRST = 6
#: A unit is slower when its lag reaches 1.35 times (as a logarithm) and exceeds three standard errors (here squared).
#: It stays slower until its lag falls below 1.1 times.
SLOWER, NO_SLOWER, BY_CHANCE = 0.3, 0.1, 9.0
#: A verdict expires after 30 times the mean seconds of an answer, bounded to 5 to 600 seconds. Each confirmed verdict
#: doubles this, up to 32 times.
SILENT, SHORTEST, LONGEST, LONGER = 30.0, 5.0, 600.0, 32


class PaceMeasurements:
    """The measurements of one unit."""

    __slots__ = ("answers", "duration_factor", "expires_at", "lag")

    def __init__(self) -> None:
        self.answers = 0
        #: Logarithm of its seconds per token over the mean of all units.
        self.lag = 0.0
        #: When the verdict "slower" expires, and the factor on how long the next verdict lasts.
        self.expires_at, self.duration_factor = 0.0, 1


class PaceEstimates:
    """The speed estimates of all units of one pool, from the answers that this process has relayed."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self._answers = 0
        self._mean = 0.0  # logarithm of the seconds for each token
        self._variance = 1.0  # variance of answers around their unit's mean
        self._mean_duration = 0.0  # mean seconds of an answer
        self._slower: list[Unit] = []

    def record_answer(self, unit: Unit, started_at: float, tokens: int) -> None:
        """Record an answer of `tokens` output tokens that `unit` has finished. `started_at` is in the time of `now`."""
        now = self.now()
        seconds = now - started_at
        if not FEWEST <= tokens <= MOST or seconds <= 0:
            return
        if (measured := unit.measurements) is None:
            measured = unit.measurements = PaceMeasurements()
        log_pace, answers, variance, lag = log(seconds / tokens), self._answers + 1, self._variance, measured.lag
        mean = log_pace if answers == 1 else self._mean
        log_pace = min(mean + FURTHEST, max(mean - FURTHEST, log_pace))
        weight = 1 / answers if answers < ALL else OF_ALL
        self._answers, self._mean_duration = answers, self._mean_duration + weight * (seconds - self._mean_duration)
        self._mean = mean = mean + weight * (log_pace - mean)
        deviation = log_pace - mean - lag
        self._variance = variance + (1 / (answers + SPREADING) if answers < ALL else OF_ALL) * (
            deviation * deviation - variance
        )
        measured.answers = own = measured.answers + 1
        weight = 1 / (own + BEGINNING) if own < ONE else OF_ONE
        measured.lag = lag = lag + weight * deviation
        if lag >= SLOWER or unit.pace > 1:
            self._update_verdict(unit, measured, weight)
        elif lag < NO_SLOWER:
            measured.duration_factor = 1
        if self._slower:
            self._expire_verdicts(now)

    def _update_verdict(self, unit: Unit, measured: PaceMeasurements, weight: float) -> None:
        """Set or clear the verdict of a unit whose lag is high or that is called slower, and its expiry."""
        lag = measured.lag
        if unit.pace == 1:
            if measured.answers < FIRST or lag * lag <= BY_CHANCE * self._variance * weight:
                return
            self._slower.append(unit)
        elif lag < NO_SLOWER:
            self._slower.remove(unit)
            unit.pace, measured.duration_factor = 1.0, 1
            return
        unit.pace = exp(lag)
        measured.expires_at = self.now() + measured.duration_factor * min(
            LONGEST, max(SHORTEST, SILENT * self._mean_duration)
        )

    def _expire_verdicts(self, now: float) -> None:
        """Drop the expired verdicts. The unit's lag stays just high enough that slow answers restore the verdict."""
        for unit in [unit for unit in self._slower if unit.measurements is None or unit.measurements.expires_at <= now]:
            self._slower.remove(unit)
            unit.pace = 1.0
            if (measured := unit.measurements) is not None:
                measured.lag = min(measured.lag, SLOWER)
                measured.duration_factor = min(LONGER, 2 * measured.duration_factor)
