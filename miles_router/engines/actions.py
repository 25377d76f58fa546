"""The actions that a control request can mean, independent of the engine that spells it (`Engine.order`). No I/O."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

PAUSE_MODES = ("abort", "retract", "in_place")
#: Parts of its GPU memory without which an engine cannot generate.
MEMORY = frozenset({"weights", "kv_cache"})


@dataclass(frozen=True)
class Pause:
    """A stop of all generation. `mode` is one of `PAUSE_MODES`."""

    mode: str


@dataclass(frozen=True)
class Continue:
    """The end of a pause."""


@dataclass(frozen=True)
class Abort:
    """The abort of one generation. `name` is the engine's request id (`rid`)."""

    name: str


@dataclass(frozen=True)
class AbortAll:
    """The abort of every generation."""


@dataclass(frozen=True)
class EndGroup:
    """The abort of all running generations of a rollout group. Engines have no groups, so the router aborts each by its
    `rid`."""

    group: str | int


@dataclass(frozen=True)
class Flush:
    """A flush of the prefix cache."""


@dataclass(frozen=True)
class Sleep:
    """The release of parts of the GPU memory, such as "weights" and "kv_cache"."""

    parts: Set[str]


@dataclass(frozen=True)
class Wake:
    """The re-allocation of released parts of the GPU memory. An empty set means all of them."""

    parts: Set[str]


@dataclass(frozen=True)
class NameVersion:
    """A new weight version for the loaded weights, which do not change. `aborts`: the engine also aborts every
    generation."""

    version: str
    aborts: bool = False


@dataclass(frozen=True)
class Update:
    """A change of the weights.

    Attributes:
        version: the new weight version; None if the request names none.
        flushes: the engine also flushes its prefix cache.
    """

    version: str | None
    flushes: bool = False


@dataclass(frozen=True)
class ChangeAdapter:
    """The loading or unloading of a LoRA adapter.

    Attributes:
        name: the adapter; None if the request has no readable name.
        path: where the engine loads the adapter from; None if the request gives no path.
        loads: True to load, False to unload; None if the path of the request does not decide it.
    """

    name: str | None
    path: str | None = None
    loads: bool | None = None


@dataclass(frozen=True)
class Other:
    """A control request that changes no state that the router tracks."""

    path: str


Action = (
    Pause | Continue | Abort | AbortAll | EndGroup | Flush | Sleep | Wake | NameVersion | Update | ChangeAdapter | Other
)


@dataclass(frozen=True)
class Order:
    """A control request to one engine. `body` is JSON."""

    method: str
    target: bytes
    body: bytes
