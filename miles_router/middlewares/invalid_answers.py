"""A count of the self-contradictory answers of each worker, with log lines."""

from __future__ import annotations

import logging
from collections import Counter

logger = logging.getLogger(__name__)

#: Counts at which a line is logged: a line for each answer would flood the log.
NAMED_AT = frozenset(10**power for power in range(10))


def flag_worker(counts: Counter[str], worker: str | None) -> None:
    """Count an answer that cannot be recorded because it contradicts itself. Log its worker at the 1st, 10th, 100th ...
    such answer."""
    name = worker or "unknown"
    counts[name] += 1
    if counts[name] in NAMED_AT:
        logger.warning("worker_answers_invalid", extra={"fields": {"worker": name, "answers": counts[name]}})
