"""The base types of control requests: how an engine spells them, and how they are parsed into actions. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from miles_router.engines.actions import Action, EndGroup, Other

#: Timeouts in seconds.
QUICK, SLOW = 60.0, 1800.0
#: The router's own field of an abort, accepted for every engine.
GROUP = "group"
#: Separates the values of a repeated query parameter in `Arguments.query`. Not a comma, which is a part of one value.
BETWEEN = "&"


class BadArguments(ValueError):
    """An error about a control request with invalid arguments. The message explains it."""


class Arguments(NamedTuple):
    """The arguments of a control request: the fields of its JSON body and of its query."""

    fields: Mapping[str, Any]
    query: Mapping[str, str]


@dataclass(frozen=True)
class ControlRequest:
    """A control request, as one engine spells it.

    Attributes:
        read: parses the arguments into an action. Raises BadArguments.
        timeout: seconds to wait for the engine.
        needs_body: the engine refuses a POST without a body; the router then sends an empty object.
        may_come_twice: the router may send the request again after its connection was lost.
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
    """Return a control request that changes no state that the router tracks."""
    return ControlRequest(path, lambda _: Other(path), methods=methods, timeout=timeout, needs_body=needs_body)


def group_in(arguments: Arguments) -> EndGroup | None:
    """Return the `EndGroup` action if the abort names a group, else None.

    Raises:
        BadArguments: `group` is not a string or integer, or other fields are present.
    """
    group = arguments.fields.get(GROUP)
    if group is None:
        return None
    named = isinstance(group, (str, int)) and not isinstance(group, bool) and group != ""
    if not named or len(arguments.fields) != 1:
        raise BadArguments("group must be a non-empty string or an integer, and the only field")
    return EndGroup(group)
