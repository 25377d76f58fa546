"""What may be seen between the first look at a soak and the last."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MIB = 1024 * 1024
#: Looks that are not judged: caches fill, and the allocator finds its size.
WARM_UP = 0.3
#: How much higher the last third may be than the first: of the memory a part, or so many bytes; of the others a number.
RSS_PART, RSS_SLACK, COUNT_SLACK = 0.05, 8 * MIB, 8
#: Resident bytes that the router may have at all, with the limits that a soak gives it.
RSS_BOUND = 512 * MIB


@dataclass(frozen=True)
class Look:
    """The router in a moment of silence. `tokens` are those of the text cache; bytes are of memory."""

    seconds: float
    rss: int
    descriptors: int
    tasks: int
    in_flight: int
    held: int
    sessions: int
    texts: int
    tokens: int
    row_bytes: int


def judged(looks: Sequence[Look]) -> Sequence[Look]:
    """Those behind the warm-up."""
    return looks[int(len(looks) * WARM_UP) :]


def broken_rules(looks: Sequence[Look], *, max_tokens: int, max_row_bytes: int) -> list[str]:
    """What is not as it should be, in words; nothing where all is well."""
    late = judged(looks)
    if len(late) < 3:
        return [f"{len(looks)} looks are too few to judge"]
    broken = []
    for name, of in COUNTS.items():
        first, last = _thirds(late, of)
        if last > first + COUNT_SLACK:
            broken.append(f"{name} grow: {first:g} in the first third, {last:g} in the last")
    first, last = _thirds(late, lambda look: look.rss)
    if last > first + max(RSS_SLACK, RSS_PART * first):
        broken.append(f"memory grows: {first / MIB:.1f} MiB in the first third, {last / MIB:.1f} MiB in the last")
    highest = max(look.rss for look in looks)
    if highest > RSS_BOUND:
        broken.append(f"{highest / MIB:.1f} MiB of memory are over the bound")
    for name, gone in GONE.items():
        left = [look for look in looks if gone(look)]
        if left:
            broken.append(f"{name} are left in silence after {left[0].seconds:.0f} s: {gone(left[0])}")
    broken += [
        f"{bounded} of {bound} {name} are held"
        for name, bounded, bound in (
            ("tokens", max(look.tokens for look in looks), max_tokens),
            ("bytes of rows", max(look.row_bytes for look in looks), max_row_bytes),
        )
        if bounded > bound
    ]
    return broken


COUNTS: dict[str, Callable[[Look], float]] = {
    "descriptors": lambda look: look.descriptors,
    "tasks": lambda look: look.tasks,
}
GONE: dict[str, Callable[[Look], int]] = {
    "requests in flight": lambda look: look.in_flight,
    "requests at the gate": lambda look: look.held,
    "sessions": lambda look: look.sessions,
}


def _thirds(looks: Sequence[Look], of: Callable[[Look], float]) -> tuple[float, float]:
    """The middle value of the first third and of the last."""
    size = max(1, len(looks) // 3)
    return statistics.median(map(of, looks[:size])), statistics.median(map(of, looks[-size:]))
