"""What the router has an engine do, by its meaning. Each engine spells it in its own way (`Engine.order`). Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pause:
    """Stop generating. `mode`: "abort", "retract" or "in_place"."""

    mode: str


@dataclass(frozen=True)
class Continue:
    """Go on generating."""


@dataclass(frozen=True)
class Abort:
    """End a generation, by the engine's name of it."""

    name: str


@dataclass(frozen=True)
class Flush:
    """Empty the prefix cache."""


@dataclass(frozen=True)
class NameVersion:
    """Call the weights that are there by this version."""

    version: str


Action = Pause | Continue | Abort | Flush | NameVersion


@dataclass(frozen=True)
class Order:
    """A control request to one engine; the body is JSON."""

    method: str
    target: bytes
    body: bytes
