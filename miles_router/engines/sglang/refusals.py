"""A parser of SGLang's messages about the context window (0.5.23, `tokenizer_manager.py`). No I/O."""

from __future__ import annotations

import re

from miles_router.engines.refusals import Overflow

_TOO_LONG = re.compile(r"The input \((\d+) tokens\) is longer than the model's context length \((\d+) tokens\)")
_TOO_MANY = re.compile(
    r"maximum context length of (\d+) tokens\. You requested a total of \d+ tokens: "
    r"(\d+) tokens from the input messages and (\d+) tokens for the completion"
)


def overflow(message: str) -> Overflow | None:
    """Parse an error message about the context window; None if it is about something else."""
    if (found := _TOO_LONG.search(message)) is not None:
        return Overflow(int(found[1]), int(found[2]))
    if (found := _TOO_MANY.search(message)) is not None:
        return Overflow(int(found[2]), int(found[1]), int(found[3]))
    return None
