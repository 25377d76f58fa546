"""The owner process of each session or text in a router of several processes, and the names lost with a process.

The classes here are those of a router of one process, which owns everything; `shards` has the others.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson

from miles_router.asgi.backlog import Backlog
from miles_router.asgi.exchange import Receive, Scope, Send
from miles_router.errors import OwnerUnavailable, RouterError
from miles_router.metrics import Statistics
from miles_router.middlewares.contract import ASGIApp, HasOwners

#: Seconds in which each process must answer a request that is sent to all of them.
PATIENCE = 30.0


class Elsewhere(RouterError):
    """Another process should answer the request. This process has sent nothing of the reply.

    Attributes:
        owner: the number of the other process.
        needed: True if this process must not answer it instead.
    """

    def __init__(self, owner: int, *, needed: bool = True) -> None:
        super().__init__(f"process {owner} answers this")
        self.owner = owner
        self.needed = needed


class HeldNames:
    """The names of a middleware's objects, kept for the process that replaces this one.

    A router of one process is not replaced, so nothing is recorded or lost.
    """

    def add(self, name: str) -> None:
        """Record that an object with this name exists."""

    def remove(self, name: str) -> None:
        """Forget a name whose object is gone, or whose loss no longer matters."""

    def was_lost(self, name: str) -> bool:
        """Return True if an object with this name was lost with a process that ended."""
        return False


class Owners:
    """The interface of middlewares to the router's processes, here for one process that owns everything."""

    #: Whether there are other processes.
    several = False
    #: The middlewares whose objects each belong to one process.
    layers: Sequence[HasOwners] = ()
    #: The reply bytes that wait for clients, over all connections.
    backlog = Backlog()

    def numbers(self) -> Sequence[Statistics]:
        """Return the statistics about forwarding between processes."""
        return ()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the connections between the processes open within this context."""
        yield

    async def answer(
        self, scope: Scope, receive: Receive, send: Send, *, here: ASGIApp, check: Callable[[Scope], None]
    ) -> None:
        """Answer a request with the app `here`, or forward it to the owner of its object and relay the reply.

        Not called in a router of one process.

        Args:
            check: called before a request is forwarded, with its body unread; raises for requests to be refused.

        Raises:
            BadRequest: the request's forwarding headers from another process are malformed.
            OwnerUnavailable: the owner does not accept the request.
            OwnerLost: the owner was lost before its reply began, and may have executed the request.
        """
        raise NotImplementedError("there is no other process")

    def require(self, scope: Scope, name: str) -> None:
        """Return only in the process that owns the object with this name. Call it after the request's body was read.

        Raises:
            Elsewhere: another process owns it and must answer.
            OwnerUnavailable: another process has forwarded the request here, but this process is not the owner.
        """

    def prefer(self, scope: Scope) -> None:
        """Return only in the home process of the affinity key in the headers. Call it after the body was read.

        Raises:
            Elsewhere: another process is the home of the key and should answer.
        """

    def is_asked(self, scope: Scope) -> bool:
        """Return True if the request comes from another process that collects partial answers with `ask`."""
        return False

    def is_forwarded(self, scope: Scope) -> bool:
        """Return True if this process answers the request whatever text it is about.

        Another process has forwarded it here, or its session is here.
        """
        return False

    def others(self, scope: Scope) -> Sequence[int]:
        """Return the numbers of all other processes; empty for a request that comes from one of them by `ask`."""
        return ()

    async def ask(
        self, owner: int, scope: Scope, body: bytes, patience: float | None = None, **headers: str
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Send the request with this body to another process, and return its status, headers and body.

        Args:
            patience: the timeout in seconds; None: as long as the client waits.

        Raises:
            OwnerUnavailable: the process cannot be reached, or does not answer in time.
        """
        raise NotImplementedError("there is no other process")

    async def answers(self, scope: Scope) -> list[Any]:
        """Send the request without a body to all other processes, and return their parsed JSON answers.

        Raises:
            OwnerUnavailable: one process does not answer, so the result would be incomplete.
        """
        return await self.answers_to(_reading(scope), b"")

    async def answers_to(self, scope: Scope, body: bytes) -> list[Any]:
        """Send the request with this body to all other processes, and return their JSON answers in order of `others`.

        Raises:
            OwnerUnavailable: one process does not answer with 200, so the result would be incomplete.
        """
        others = self.others(scope)
        found = []
        replies = await asyncio.gather(*(self.ask(other, scope, body, PATIENCE) for other in others))
        for other, (status, _, answer) in zip(others, replies, strict=True):
            if status != 200:
                raise OwnerUnavailable(f"process {other} answers {status}")
            found.append(orjson.loads(answer))
        return found

    async def first_answer(self, scope: Scope, body: bytes) -> tuple[int, Mapping[str, str], bytes] | None:
        """Ask the other processes one after another, and return the first answer that is not 404, or None.

        Raises:
            OwnerUnavailable: a process cannot be reached, or does not answer in time.
        """
        reading = _reading(scope)
        for other in self.others(scope):
            status, headers, answer = await self.ask(other, reading, body)
            if status != 404:
                return status, headers, answer
        return None

    def new_name(self) -> str:
        """Return an unguessable name for a new object, such that this process owns it."""
        return secrets.token_hex(16)

    def held_names(self, kind: str, capacity: int) -> HeldNames:
        """Return the table of names of a middleware's objects of this kind, at most `capacity` of them."""
        return HeldNames()

    def own_url(self, base_url: str) -> str | None:
        """Return the URL that reaches this process alone, for a client that knows `base_url`; None if there is none."""
        return None


def _reading(scope: Scope) -> Scope:
    """Return the scope with GET in place of HEAD, because a reply to HEAD has no body."""
    return {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
