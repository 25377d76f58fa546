"""Reads vLLM's context window errors (0.32.0, `v1/engine/input_processor.py`, `renderers/params.py`). Pure."""

from __future__ import annotations

import re

from miles_router.engines.refusals import Overflow

_TOO_LONG = re.compile(r"prompt \(length (\d+)\).* is longer than the maximum model length of (\d+)")
_AT_LEAST = re.compile(r"maximum context length is (\d+) tokens\. .*prompt contains at least (\d+) input tokens")


def overflow(message: str) -> Overflow | None:
    """Return the token counts in a context window error; None for any other error."""
    if (found := _TOO_LONG.search(message)) is not None:
        return Overflow(int(found[1]), int(found[2]))
    if (found := _AT_LEAST.search(message)) is not None:
        return Overflow(int(found[2]), int(found[1]))
    return None
