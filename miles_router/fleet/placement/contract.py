"""The contract of a placement policy.

    class MostRoom:
        def choose(self, candidates, request):
            return request.home or max(candidates, key=lambda unit: (unit.capacity or 0) - unit.tokens)

Load a policy of your own by its dotted path: `--policy my_package.placement.MostRoom`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

from miles_router.fleet.workers import Unit


class PlacementRequest(NamedTuple):
    """The facts about one request that a policy may use."""

    #: The unit where the request's session is at home, if it is among the candidates. None without a session.
    home: Unit | None = None
    #: How many requests of the session this home has served.
    stayed: int = 0
    #: How many requests of the session are in flight.
    running: int = 0
    #: Prompt length in tokens, estimated from the body's bytes. 0 for a request that generates nothing.
    tokens: int = 0
    #: The request body as it came. Empty for a request that generates nothing.
    body: bytes = b""
    #: How often the session has moved to another unit.
    moved: int = 0


#: Build a `PlacementRequest` from a tuple of all its fields, in half the time of its constructor.
placement_request = partial(tuple.__new__, PlacementRequest)


class Policy(Protocol):
    """A rule that chooses the worker, or the rank of a worker, for one request."""

    def choose(self, candidates: Sequence[Unit], request: PlacementRequest) -> Unit:
        """Return one of `candidates`, of which there are at least two. Any unit but `request.home` moves the session.

        A policy may read these attributes of a unit and must not change them:

        - `in_flight`: requests in flight;
        - `tokens`: tokens of the prompts in flight, and of sessions at home there whose tools work meanwhile;
        - `sessions`: sessions at home there;
        - `capacity`: how many tokens fit into its KV cache, None where the engine does not report it;
        - `pace`: how many times as long as elsewhere each token takes there, 1 until measurements show a difference;
        - `chosen_at`: the sequence number of the choice that chose it last;
        - `rank` and `worker`.
        """
        ...
