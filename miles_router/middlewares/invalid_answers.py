"""Workers whose answers contradict themselves: counted, and named in the log."""

from __future__ import annotations

import logging
from collections import Counter

logger = logging.getLogger(__name__)

#: Counts at which a worker is named: a log with a line for each answer would hide all others.
NAMED_AT = frozenset(10**power for power in range(10))


def flag_worker(counts: Counter[str], worker: str | None) -> None:
    """Count an answer that cannot be recorded since it contradicts itself. The worker is named in the log at its first,
    its tenth, its hundredth and so on."""
    name = worker or "unknown"
    counts[name] += 1
    if counts[name] in NAMED_AT:
        logger.warning("worker_answers_invalid", extra={"fields": {"worker": name, "answers": counts[name]}})
