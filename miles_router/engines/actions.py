"""What the router has an engine do, by its meaning. Each engine spells it in its own way (`Engine.order`). Pure."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

PAUSE_MODES = ("abort", "retract", "in_place")
#: The parts of its memory without which an engine cannot generate.
MEMORY = frozenset({"weights", "kv_cache"})


@dataclass(frozen=True)
class Pause:
    """Stop generating. `mode`: one of `PAUSE_MODES`."""

    mode: str


@dataclass(frozen=True)
class Continue:
    """Go on generating."""


@dataclass(frozen=True)
class Abort:
    """End a generation, by the engine's name of it."""

    name: str


@dataclass(frozen=True)
class AbortAll:
    """End every generation."""


@dataclass(frozen=True)
class EndGroup:
    """End what a group of rollouts has under way. Engines know no groups: each generation is aborted by its name."""

    group: str | int


@dataclass(frozen=True)
class Flush:
    """Empty the prefix cache."""


@dataclass(frozen=True)
class Sleep:
    """Release parts of the memory."""

    parts: Set[str]


@dataclass(frozen=True)
class Wake:
    """Take parts of the memory again. Empty: all."""

    parts: Set[str]


@dataclass(frozen=True)
class NameVersion:
    """Call the weights that are there by this version. `aborts`: and end every generation."""

    version: str
    aborts: bool = False


@dataclass(frozen=True)
class Update:
    """Change the weights. `version`: what they are called then, None where nothing says so. `flushes`: and empty the
    prefix cache."""

    version: str | None
    flushes: bool = False


@dataclass(frozen=True)
class ChangeAdapter:
    """Load or unload the adapter of this name; None where it has none that can be read.

    Attributes:
        path: where it is loaded from; None where the request says it in another way.
        loads: whether it is loaded; None where the request's path does not say so.
    """

    name: str | None
    path: str | None = None
    loads: bool | None = None


@dataclass(frozen=True)
class Other:
    """What changes nothing that the router knows of an engine."""

    path: str


Action = (
    Pause | Continue | Abort | AbortAll | EndGroup | Flush | Sleep | Wake | NameVersion | Update | ChangeAdapter | Other
)


@dataclass(frozen=True)
class Order:
    """A control request to one engine; the body is JSON."""

    method: str
    target: bytes
    body: bytes
