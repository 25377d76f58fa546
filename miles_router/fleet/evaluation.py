"""Evaluations: requests, and the episodes they belong to, that one weight version samples and that leave no rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_router.asgi.headers import RawHeaders, first_header
from miles_router.errors import BadRequest, WeightsChanged

if TYPE_CHECKING:
    from miles_router.fleet.pool import WorkerPool

HEADER = b"x-evaluation"
AGAIN = "begin the episode again to evaluate the newer weights"


class Evaluation:
    """The one weight version that may sample a request of an evaluation, in all of its attempts.

    Args:
        version: the version that sampled earlier turns of the episode; None if the first worker decides.
        waits: whether the request waits at the gate while the fleet has another version, instead of being refused.
    """

    def __init__(self, pool: WorkerPool, version: str | None = None, *, waits: bool = False) -> None:
        self.version = version
        self._pool = pool
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
            WeightsChanged: a version differs, or the fleet's weights have no name that would tell them apart.
        """
        if self._pool.unnamed_weights:
            raise WeightsChanged("an evaluation needs named weights, and the last update named no weight_version")
        for version in versions:
            if version is not None and self.version not in (None, version):
                raise self.refusal(version)
            self.version = self.version or version

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
