"""What a policy is: it chooses the unit of one request, and does nothing else.

    class MostRoom:
        def choose(self, candidates, need):
            return need.home or max(candidates, key=lambda unit: (unit.capacity or 0) - unit.tokens)

A router takes one of its own by a dotted path: `--policy my_package.placement.MostRoom`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

from miles_router.fleet.workers import Unit


class Need(NamedTuple):
    """What a policy knows of a request."""

    #: Where its session is at home, if that is among the candidates; None for a request without a session.
    home: Unit | None = None
    #: How many requests of its session that has had since the session came there.
    stayed: int = 0
    #: How many requests of its session are in flight.
    running: int = 0
    #: Tokens of its prompt, as its bytes tell; 0 for a request that generates nothing.
    tokens: int = 0
    #: The request as it came; empty for one that generates nothing.
    body: bytes = b""
    #: How often its session has moved.
    moved: int = 0


#: One with all its fields, in half the time.
need_of = partial(tuple.__new__, Need)


class Policy(Protocol):
    """Chooses the unit of one request: the only thing a policy can do."""

    def choose(self, candidates: Sequence[Unit], need: Need) -> Unit:
        """One of `candidates`, which are two or more. A choice other than `need.home` moves the session there.

        Of a unit it may read: `in_flight` requests, `tokens` (those of the prompts in flight, and those that sessions
        hold there while their tools work), `sessions`, `capacity` (tokens of memory for keys and values, as its engine
        says; None where it says nothing), `pace` (how many times as long as elsewhere its answers take for each token;
        1 while nothing says that it is slower), `chosen_at` (the number of the choice that chose it last), `rank` and
        `worker`. It writes nothing.
        """
        ...
