"""Control requests as an engine spells them: read into actions. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from miles_router.engines.actions import Action, EndGroup, Other

#: Seconds that an engine may take.
QUICK, SLOW = 60.0, 1800.0
#: The router's own field of an abort, whichever engine spells the rest.
GROUP = "group"


class BadArguments(ValueError):
    """A control request that no engine could make sense of. The message says why."""


class Arguments(NamedTuple):
    """The arguments of a control request: the fields of its body, and those of its query."""

    fields: Mapping[str, Any]
    query: Mapping[str, str]


@dataclass(frozen=True)
class ControlRequest:
    """A control request, as one engine spells it.

    Attributes:
        read: returns the action that is meant. Raises BadArguments.
        timeout: seconds that an engine may take.
        needs_body: the engine refuses a POST without a body; the router sends an empty object then.
        may_come_twice: a request that was lost on its connection may be sent again.
    """

    path: str
    read: Callable[[Arguments], Action]
    methods: tuple[str, ...] = ("POST",)
    timeout: float = QUICK
    needs_body: bool = False
    may_come_twice: bool = False


def other(
    path: str, *, methods: tuple[str, ...] = ("POST",), timeout: float = QUICK, needs_body: bool = False
) -> ControlRequest:
    """Return a control request that changes nothing which the router knows."""
    return ControlRequest(path, lambda _: Other(path), methods=methods, timeout=timeout, needs_body=needs_body)


def group_in(arguments: Arguments) -> EndGroup | None:
    """Return the order to end a group, where an abort names one.

    Raises:
        BadArguments: it is no name, or does not stand alone.
    """
    group = arguments.fields.get(GROUP)
    if group is None:
        return None
    named = isinstance(group, (str, int)) and not isinstance(group, bool) and group != ""
    if not named or len(arguments.fields) != 1:
        raise BadArguments("group must be a string or a whole number, and stand alone")
    return EndGroup(group)
