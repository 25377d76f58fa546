"""A count of self-contradicting answers per worker, with a warning in the log."""

from __future__ import annotations

import logging
from collections import Counter

logger = logging.getLogger(__name__)

#: The counts that are logged. One line per answer would hide all other lines.
NAMED_AT = frozenset(10**power for power in range(10))


def flag_worker(counts: Counter[str], worker: str | None) -> None:
    """Count an answer that contradicts itself and so cannot be recorded. Log the worker at counts 1, 10, 100, ..."""
    name = worker or "unknown"
    counts[name] += 1
    if counts[name] in NAMED_AT:
        logger.warning("worker_answers_invalid", extra={"fields": {"worker": name, "answers": counts[name]}})
