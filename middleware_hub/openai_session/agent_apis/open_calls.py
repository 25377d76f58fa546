"""Arguments of tool calls that are cut, or may be: they never look complete."""

from __future__ import annotations


def open_arguments(arguments: str) -> str:
    """Return the arguments without their closing brace. An engine that is cut inside a call adds that brace itself."""
    stripped = arguments.rstrip()
    return stripped[:-1] if stripped.endswith("}") else arguments


class OpenArguments:
    """The streamed arguments of one tool call. A closing brace is held back until later output proves that the call was
    sampled to its end."""

    def __init__(self) -> None:
        self.waiting = ""

    def feed(self, arguments: str) -> str:
        """Add arguments; return the part that may be shown now."""
        arguments = self.waiting + arguments
        shown = open_arguments(arguments)
        self.waiting = arguments[len(shown) :]
        return shown
