"""How much a run of the tests does: `pytest --tier ci|nightly|heavy`. Every size that depends on it is given here.

ci        few examples, always the same ones; small proofs on real SGLang
nightly   many examples, other ones each time
heavy     storms, and the proofs on real SGLang at full length
"""

from __future__ import annotations

from typing import TypeVar

from hypothesis import HealthCheck, settings

TIERS = ("ci", "nightly", "heavy")
#: Of the examples and rounds of the nightly tier, what the others have.
SHARE, LEAST = 6, 8

Size = TypeVar("Size")

_tier = "ci"


def choose(tier: str) -> None:
    """Called before any module of tests is imported."""
    global _tier
    _tier = tier
    # A machine may be busy: how long an example takes says nothing.
    patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    settings.register_profile("nightly", patient, print_blob=True)
    settings.register_profile("few", patient, max_examples=examples(100), derandomize=True, database=None)
    settings.load_profile("nightly" if tier == "nightly" else "few")


def examples(nightly: int) -> int:
    """Examples of a property, or rounds of a loop over random cases, by how many the nightly tier has."""
    return nightly if _tier == "nightly" else min(nightly, max(LEAST, nightly // SHARE))


def nightly() -> bool:
    """Whether this is the tier of tests that take long and need no SGLang."""
    return _tier == "nightly"


def heavy() -> bool:
    """Whether this is the tier of long proofs on real SGLang."""
    return _tier == "heavy"


def fuzzing(runs: int) -> tuple[int | None, float | None, int | None]:
    """For how many runs and seconds a target is fuzzed, and with which seed; None for another one each time."""
    return (None, 60.0, None) if nightly() else (runs, None, 0)


def size(*, heavy: Size, otherwise: Size) -> Size:
    """The size of a proof or a storm."""
    return heavy if _tier == "heavy" else otherwise
