"""Profiles: what an engine does otherwise than the rest of this package says. Pure.

Nearly all engines need none. One that differs has a file of its own beside this one; `facts.py` tells by what an engine
says which profile it has, and everybody else asks the profile, never for a name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from miles_router.engines import paths
from miles_router.engines.events import Event

#: Parses a request's body within its bounds.
Parse = Callable[[bytes], Any]


class CannotServe(ValueError):
    """A request that an engine would not answer as it is meant. The message says what it lacks."""


class Translation(Protocol):
    """One request as an engine has to be asked, and its answers as SGLang would have given them."""

    #: What the engine is sent.
    body: bytes
    #: What the engine calls the generations that the client has named: its name by the client's.
    rids: Mapping[str, str]
    #: Whether the engine keeps prefix caches apart by the key that is written into it.
    heeds_cache_key: bool

    def whole(self, answer: bytes, version: str | None) -> bytes:
        """A whole answer. `version` is that of the weights, where the router alone knows it.

        Raises:
            UnreadableAnswer: it lacks something, or contradicts itself. So with `event`.
        """
        ...

    def event(self, event: Event, version: str | None) -> bytes:
        """An event of a stream."""
        ...


#: `(path, body, parse)`: how a request to this path is asked; None where it goes as it came. Raises CannotServe where
#: the engine would answer something else than is meant, UnknownShape where that cannot be seen.
Translate = Callable[[str, bytes, Parse], Translation | None]


@dataclass(frozen=True)
class Profile:
    """How an engine is dealt with. The fields' defaults are SGLang's, which is the usual one."""

    name: str = "sglang"
    #: None: requests and answers pass as they are.
    translate: Translate | None = None
    #: Where a deep check asks for a token.
    health: str = paths.HEALTH
    #: Whether it says which weights it has. Where not, they are what the router was told.
    tells_version: bool = True
    #: The modes of a pause that it is told in place of others.
    pauses: Mapping[str, str] = field(default_factory=dict)
    #: Whether it can release its memory, and have it again.
    sleeps: bool = True
    #: Whether a generation that is aborted by its name is answered with all that it has sampled.
    returns_aborted: bool = True


USUAL = Profile()
