"""How fast units are: how long each token of an answer takes there, beside all others. Pure.

How long an answer takes says little, since some are many times as long as others; with the number of its tokens it says
how fast its unit is now, with all that it has to do. Long prompts and queues are in it, so that answers of one unit
differ, too. By how much is learned as well: a unit is called slower once chance does not explain it.
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
#: Answers of fewer tokens say more of their prompts.
FEWEST = 16
#: A unit is slower where it takes 1.35 times as long, as a logarithm, and that is three times what chance makes of it.
SLOWER, BY_CHANCE = 0.3, 9.0


class Paces:
    """Learns those of all units of one pool, by the answers that this process has seen."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self._answers = 0
        self._mean = 0.0  # logarithm of the seconds for each token
        self._spread = 1.0  # mean square of how far answers are from their unit's mean

    def note(self, unit: Unit, seconds: float, tokens: int) -> None:
        """An answer of so many tokens has taken so long there."""
        if tokens < FEWEST or seconds <= 0:
            return
        taken = log(seconds / tokens)
        self._answers = answers = self._answers + 1
        unit.answers = own = unit.answers + 1
        mean, spread, lag = self._mean, self._spread, unit.lag
        self._mean = mean = mean + (1 / answers if answers < ALL else OF_ALL) * (taken - mean)
        apart = taken - mean - lag
        self._spread = spread + (1 / (answers + SPREADING) if answers < ALL else OF_ALL) * (apart * apart - spread)
        weight = 1 / (own + BEGINNING) if own < ONE else OF_ONE
        unit.lag = lag = lag + weight * apart
        slower = lag >= SLOWER and lag * lag > BY_CHANCE * self._spread * weight
        unit.pace = exp(lag) if slower else 1.0
