"""Which unit takes a request: the least loaded, and with a key always the same one while it is routable."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from operator import attrgetter

from miles_router.fleet.pool import Policy
from miles_router.fleet.workers import Unit

_LOAD = attrgetter("in_flight", "chosen_at")


class LeastInFlight:
    """Fewest requests in flight; ties go to the worker that was chosen longest ago, so no position in the list wins."""

    def choose(self, candidates: Sequence[Unit], key: str | None) -> Unit:
        return min(candidates, key=_LOAD)


class KeyAffinity:
    """The same key goes to the same unit while that one is routable; everything else is `inner`'s choice.

    The assignment is remembered rather than hashed: a worker that joins takes no key away from one that works. The
    table holds the `max_keys` most recently used keys; a forgotten key is simply assigned anew.
    """

    def __init__(self, inner: Policy, max_keys: int = 100_000) -> None:
        self._inner = inner
        self._max_keys = max_keys
        self._assigned: OrderedDict[str, Unit] = OrderedDict()

    def choose(self, candidates: Sequence[Unit], key: str | None) -> Unit:
        if key is None:
            return self._inner.choose(candidates, None)
        unit = self._assigned.get(key)
        if unit is None or unit not in candidates:
            unit = self._inner.choose(candidates, key)
            self._assigned[key] = unit
            if len(self._assigned) > self._max_keys:
                self._assigned.popitem(last=False)
        self._assigned.move_to_end(key)
        return unit
