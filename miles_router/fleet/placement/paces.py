"""How fast units are: how long each token of an answer takes there, beside all answers. Pure.

How long an answer takes says little, since some are many times as long as others; with the number of its tokens it says
how fast its unit is now, with all that it has to do. Long prompts and queues are in it, so that answers of one unit
differ, too. By how much is learned as well: a unit is called slower once chance does not explain it.

Who is called slower gets less to do, down to nothing, and nothing corrects what was a passing trouble. So that is
doubted once the unit has been silent for long: the next answers tell, and if they are slow again, it is believed for
twice as long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import exp, log

from miles_router.fleet.workers import Unit

#: How many answers what is known of all, and of one unit, goes back by: one weighs as their part.
ALL, ONE = 50, 16
OF_ALL, OF_ONE = 1 / ALL, 1 / ONE
#: How many answers at the pace of all a unit begins with, and as many of a spread of one: a factor of e.
BEGINNING, SPREADING = 2, 8
#: Answers of fewer tokens say more of their prompts, and of more nobody gives any.
FEWEST, MOST = 16, 1_000_000
#: Of one answer no more is believed, as a logarithm: it may have stood still.
FURTHEST = 1.5
#: Nothing is said of a unit before so many answers of it.
FIRST = 6
#: A unit is slower where it takes 1.35 times as long, as a logarithm, and that is three times what chance makes of it;
#: until it takes 1.1 times as long.
SLOWER, NO_SLOWER, BY_CHANCE = 0.3, 0.1, 9.0
#: It is doubted after so many times as long as an answer takes in the mean, within these bounds in seconds; and at most
#: so many times as long, when it has turned out to be true.
SILENT, SHORTEST, LONGEST, LONGER = 30.0, 5.0, 600.0, 32


class Learned:
    """What is known of one unit."""

    __slots__ = ("answers", "doubted_at", "lag", "patience")

    def __init__(self) -> None:
        self.answers = 0
        #: How much longer it takes for a token, as a logarithm.
        self.lag = 0.0
        #: When it is doubted that it is slower, and after how many times as long a silence.
        self.doubted_at, self.patience = 0.0, 1


class Paces:
    """Learns those of all units of one pool, by the answers that this process has seen."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self._answers = 0
        self._mean = 0.0  # logarithm of the seconds for each token
        self._spread = 1.0  # mean square of how far answers are from their unit's mean
        self._lasts = 0.0  # seconds of an answer, in the mean
        self._slower: list[Unit] = []

    def note(self, unit: Unit, begun: float, tokens: int) -> None:
        """An answer of so many tokens, asked for at that time, has ended there."""
        now = self.now()
        seconds = now - begun
        if not FEWEST <= tokens <= MOST or seconds <= 0:
            return
        if (learned := unit.learned) is None:
            learned = unit.learned = Learned()
        taken, answers, spread, lag = log(seconds / tokens), self._answers + 1, self._spread, learned.lag
        mean = taken if answers == 1 else self._mean
        taken = min(mean + FURTHEST, max(mean - FURTHEST, taken))
        weight = 1 / answers if answers < ALL else OF_ALL
        self._answers, self._lasts = answers, self._lasts + weight * (seconds - self._lasts)
        self._mean = mean = mean + weight * (taken - mean)
        apart = taken - mean - lag
        self._spread = spread + (1 / (answers + SPREADING) if answers < ALL else OF_ALL) * (apart * apart - spread)
        learned.answers = own = learned.answers + 1
        weight = 1 / (own + BEGINNING) if own < ONE else OF_ONE
        learned.lag = lag = lag + weight * apart
        if lag >= SLOWER or unit.pace > 1:
            self._judge(unit, learned, weight)
        elif lag < NO_SLOWER:
            learned.patience = 1
        if self._slower:
            self._doubt(now)

    def _judge(self, unit: Unit, learned: Learned, weight: float) -> None:
        """Say whether one is slower that seems so, or did."""
        lag = learned.lag
        if unit.pace == 1:
            if learned.answers < FIRST or lag * lag <= BY_CHANCE * self._spread * weight:
                return
            self._slower.append(unit)
        elif lag < NO_SLOWER:
            self._slower.remove(unit)
            unit.pace, learned.patience = 1.0, 1
            return
        unit.pace = exp(lag)
        learned.doubted_at = self.now() + learned.patience * min(LONGEST, max(SHORTEST, SILENT * self._lasts))

    def _doubt(self, now: float) -> None:
        """Believe it no more of those that have been silent for long, until their next answers."""
        for unit in [unit for unit in self._slower if unit.learned is None or unit.learned.doubted_at <= now]:
            self._slower.remove(unit)
            unit.pace = 1.0
            if (learned := unit.learned) is not None:
                learned.lag, learned.patience = min(learned.lag, SLOWER), min(LONGER, 2 * learned.patience)
