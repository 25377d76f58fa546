"""Calls that are not, or may not be, sampled to their end: their arguments never look complete."""

from __future__ import annotations


def open_arguments(arguments: str) -> str:
    """Arguments without the brace that ends them: an engine that is cut in the middle of a call closes it by itself."""
    stripped = arguments.rstrip()
    return stripped[:-1] if stripped.endswith("}") else arguments


class OpenArguments:
    """The arguments of a call of a stream. What may end them waits, until what comes behind it shows that the call was
    sampled to its end."""

    def __init__(self) -> None:
        self.waiting = ""

    def feed(self, arguments: str) -> str:
        """So much more; gives what is shown now."""
        arguments = self.waiting + arguments
        shown = open_arguments(arguments)
        self.waiting = arguments[len(shown) :]
        return shown
