"""How SGLang says that a request does not fit (0.5.23, `tokenizer_manager.py`). Pure."""

from __future__ import annotations

import re

from miles_router.engines.refusals import Overflow

_TOO_LONG = re.compile(r"The input \((\d+) tokens\) is longer than the model's context length \((\d+) tokens\)")
_TOO_MANY = re.compile(
    r"maximum context length of (\d+) tokens\. You requested a total of \d+ tokens: "
    r"(\d+) tokens from the input messages and (\d+) tokens for the completion"
)


def overflow(message: str) -> Overflow | None:
    """Return what an error says of the context window; None where it is about something else."""
    if (found := _TOO_LONG.search(message)) is not None:
        return Overflow(int(found[1]), int(found[2]))
    if (found := _TOO_MANY.search(message)) is not None:
        return Overflow(int(found[2]), int(found[1]), int(found[3]))
    return None
