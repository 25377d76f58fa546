"""The ownership of sessions and texts among several router processes, and the names that a dead process held."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson

from miles_router.asgi.backlog import Backlog
from miles_router.asgi.exchange import Receive, Scope, Send
from miles_router.errors import RouterError, Unavailable
from miles_router.metrics import Statistics
from miles_router.middlewares.contract import ASGIApp, HasOwners

#: Seconds in which each process must answer a question to all processes.
PATIENCE = 30.0


class Elsewhere(RouterError):
    """The error that hands a request, not answered yet, to another process.

    Attributes:
        owner: the index of the other process.
        needed: whether only the owner may answer; if False, this process may answer when the owner is unavailable.
    """

    def __init__(self, owner: int, *, needed: bool = True) -> None:
        super().__init__(f"process {owner} answers this request")
        self.owner = owner
        self.needed = needed


class HeldNames:
    """The names that a middleware holds, recorded for the successor of this process.

    This base class records nothing and reports no losses: a router of one process has no successor.
    """

    def add(self, name: str) -> None:
        """Record that the process holds this name."""

    def remove(self, name: str) -> None:
        """Forget a name, whether this process holds it or an earlier one lost it."""

    def was_lost(self, name: str) -> bool:
        """Return whether a process that has ended held this name."""
        return False


class Owners:
    """The owners of names, as middlewares see them. This base class is for a router of one process, which owns all."""

    #: Whether the router has other processes.
    several = False
    #: The middlewares whose sessions or texts are each owned by one process.
    layers: Sequence[HasOwners] = ()
    #: The bytes that wait for slow clients, over all connections.
    backlog = Backlog()

    def numbers(self) -> Sequence[Statistics]:
        """Return the statistics to publish."""
        return ()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the connections between processes open inside the block."""
        yield

    async def answer_or_forward(
        self, scope: Scope, receive: Receive, send: Send, *, here: ASGIApp, check: Callable[[Scope], None]
    ) -> None:
        """Answer a request with `here`, or relay the answer of the process that owns the name in the request.

        Never called in a router of one process.

        Args:
            check: called before a request is forwarded, with its body unread; raises for requests to refuse.

        Raises:
            BadRequest: the header that marks a forwarded request is not readable.
            Unavailable: the owner does not accept the request.
            UpstreamError: the owner was lost before its answer began, and may have executed the request.
        """
        raise NotImplementedError("there is no other process")

    def require(self, scope: Scope, name: str) -> None:
        """Return only if this process owns the name. Read the request's body first.

        Raises:
            Elsewhere: another process owns the name; the router forwards the request to it.
            NotFound: another process asks for its part of an answer, and this one does not own the name.
            Unavailable: another process forwarded the request here, and this one does not own the name.
        """

    def prefer_home(self, scope: Scope) -> None:
        """Return only if this process is the home of the affinity key in the headers. Read the request's body first.

        Raises:
            Elsewhere: another process is the key's home. If it is unavailable, this process answers.
        """

    def asked_by_other_process(self, scope: Scope) -> bool:
        """Return whether the request comes from another process's `ask`, for this process's part of an answer."""
        return False

    def is_forwarded(self, scope: Scope) -> bool:
        """Return whether this process must answer the request, whichever text it is about.

        True if another process forwarded the request, this process owns its session, or the preferred process is
        unavailable.
        """
        return False

    def others(self, scope: Scope) -> Sequence[int]:
        """Return the indexes of all other processes; empty if the request comes from another process's `ask`."""
        return ()

    async def ask(
        self, owner: int, scope: Scope, body: bytes, patience: float | None = None, **headers: str
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Send the same request with this body to another process; return status, headers and body.

        Args:
            patience: the timeout in seconds; None: the HTTP client's own timeout.

        Raises:
            Unavailable: the process cannot be reached, or does not answer in time.
        """
        raise NotImplementedError("there is no other process")

    async def answers(self, scope: Scope) -> list[Any]:
        """Return the parsed JSON answers of all other processes to the same request without a body.

        Raises:
            Unavailable: one process does not answer 200, so that the result would be incomplete.
        """
        return await self.answers_to(_reading(scope), b"")

    async def answers_to(self, scope: Scope, body: bytes) -> list[Any]:
        """Return the parsed JSON answers of all other processes to a request with this body, in the order of `others`.

        Raises:
            Unavailable: one process does not answer 200, so that the result would be incomplete.
        """
        others = self.others(scope)
        found = []
        replies = await asyncio.gather(*(self.ask(other, scope, body, PATIENCE) for other in others))
        for other, (status, _, answer) in zip(others, replies, strict=True):
            if status != 200:
                raise Unavailable(f"process {other} answered with status {status}")
            found.append(orjson.loads(answer))
        return found

    async def first_answer(self, scope: Scope, body: bytes) -> tuple[int, Mapping[str, str], bytes] | None:
        """Ask the other processes in turn; return the first answer that is not 404, or None.

        Raises:
            Unavailable: a process cannot be reached, or does not answer in time.
        """
        reading = _reading(scope)
        for other in self.others(scope):
            status, headers, answer = await self.ask(other, reading, body)
            if status != 404:
                return status, headers, answer
        return None

    def new_name(self) -> str:
        """Return a random, unguessable name that this process owns."""
        return secrets.token_hex(16)

    def held_names(self, kind: str, capacity: int) -> HeldNames:
        """Return the record of the names that a middleware holds, at most `capacity` names."""
        return HeldNames()

    def own_url(self, base_url: str) -> str | None:
        """Return the URL of this process alone, for a client that uses `base_url`; None if there is no such URL."""
        return None


def _reading(scope: Scope) -> Scope:
    """Return the request with GET in place of HEAD, because an answer to HEAD has no body."""
    return {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
