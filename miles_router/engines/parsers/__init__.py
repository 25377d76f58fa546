"""What model families write: reasoning and tool calls in a text, a file for each family. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["engine", "local", "hybrid"]


@dataclass(frozen=True)
class Parsers:
    """What makes messages of texts.

    Attributes:
        mode: the engine's own parsers, local ones, or local ones where the engine has none or fails.
        family: the model's, for the local ones.
    """

    mode: Mode = "hybrid"
    family: str | None = None


#: How reasoning begins and ends, by the engine's name for its parser; of those that are not here, as in `THINK`.
MARKS = {
    "kimi": ("◁think▷", "◁/think▷"),
    "minimax-m3": ("<mm:think>", "</mm:think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}
THINK = ("<think>", "</think>")


def reasoning_marks(parser: str) -> tuple[str, str]:
    """How reasoning begins and ends for one of the engine's parsers."""
    return MARKS.get(parser, THINK)
