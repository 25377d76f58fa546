"""Evaluations: requests, and the episodes they belong to, that one weight version samples and that leave no rows."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from miles_router.asgi.wire import RawHeaders, first_header
from miles_router.errors import BadRequest, WeightsChanged

if TYPE_CHECKING:
    from miles_router.fleet.fleet import Fleet

HEADER = b"x-evaluation"
AGAIN = "begin the episode again to evaluate the newer weights"


class Evaluation:
    """The one weight version that may sample a request of an evaluation, in all of its attempts.

    Args:
        version: the version that sampled earlier turns of the episode; None if the first worker decides.
        began: when the first turn of the episode was answered (Unix seconds); None if this request is the first.
        adapters: the LoRA adapters of the request. They have no versions, and must not be loaded or unloaded meanwhile.
        waits: whether the request waits at the gate while the fleet has another version, instead of being refused.
    """

    def __init__(
        self,
        fleet: Fleet,
        version: str | None = None,
        began: float | None = None,
        *,
        adapters: Collection[str] = (),
        waits: bool = False,
    ) -> None:
        self.version = version
        self.adapters = adapters
        self._fleet, self._pool = fleet, fleet.pool
        self._began = began
        self._waits = waits

    @property
    def must_wait(self) -> bool:
        """Whether the request waits now for the fleet to have its version again."""
        fleet = self._pool.weight_version
        return self._waits and None not in (self.version, fleet) and fleet != self.version

    def check(self, *versions: str | None) -> None:
        """Check weight versions that sample or have sampled the request. The first known one decides. A version of None
        is unknown and passes.

        Raises:
            WeightsChanged: a version differs, the fleet's weights have no name that would tell them apart, or an
                adapter may have been loaded or unloaded since the first check.
        """
        self._check_adapters()
        if self._pool.unnamed_weights:
            raise WeightsChanged("an evaluation needs named weights, and the last update named no weight_version")
        for version in versions:
            if version is not None and self.version not in (None, version):
                raise self.refusal(version)
            self.version = self.version or version

    def _check_adapters(self) -> None:
        began = self._began = time.time() if self._began is None else self._began
        for name in self.adapters:
            if self._fleet.adapter_names.get(name, 0.0) > began:
                raise WeightsChanged(f"adapter {name} was loaded or unloaded since this evaluation began; {AGAIN}")
            if self._fleet.began > began:
                raise WeightsChanged(f"adapter {name} may have changed before the router was restarted; {AGAIN}")

    @contextmanager
    def sent_to(self, version: str | None) -> Iterator[None]:
        """Check the version of the worker that the request is sent to within this context. If the context raises, that
        worker has sampled nothing of it, and its version decides nothing. Raises like `check`."""
        before = self.version, self._began
        self.check(version)
        try:
            yield
        except BaseException:
            self.version, self._began = before
            raise

    def refusal(self, version: str | None = None, why: str = "") -> WeightsChanged:
        """Return the error for a request that another version would sample: `version`, or by default the fleet's."""
        other = version or self._pool.weight_version
        return WeightsChanged(f"weights {self.version} began this evaluation, and the fleet has {other}{why}; {AGAIN}")

    def cut(self) -> WeightsChanged:
        """Return the error for a request that a pause of the fleet ended early."""
        fleet = self._pool.weight_version
        if fleet != self.version:
            return self.refusal(why=" since a pause that cut this turn")
        return WeightsChanged(f"a pause cut this turn of an evaluation under weights {fleet}; send it again")


def asks_for_evaluation(headers: RawHeaders) -> bool:
    """Return whether the headers mark the request as part of an evaluation (`X-Evaluation: true`).

    Raises:
        BadRequest: the header is neither `true` nor `false`.
    """
    value = first_header(headers, HEADER)
    if value not in (None, b"true", b"false"):
        raise BadRequest("X-Evaluation must be true or false")
    return value == b"true"
