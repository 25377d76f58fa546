"""Whose a session or a text is, where a router is several processes; and what of it was lost with one of them."""

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

#: Seconds in which a process must say what it has, where all are asked.
PATIENCE = 30.0


class Elsewhere(RouterError):
    """Another process answers the request, of which nothing was answered.

    Attributes:
        owner: that process.
        needed: whether this one must not answer it.
    """

    def __init__(self, owner: int, *, needed: bool = True) -> None:
        super().__init__(f"process {owner} answers this")
        self.owner = owner
        self.needed = needed


class HeldNames:
    """The names of all that a layer holds, for the process that comes after this one. Here none comes, so nothing is
    ever lost."""

    def add(self, name: str) -> None:
        """Something is held under this name now."""

    def remove(self, name: str) -> None:
        """Nothing is held under this name any more, or what was lost need not be known."""

    def was_lost(self, name: str) -> bool:
        """Whether something was held under this name by a process that has ended."""
        return False


class Owners:
    """What a layer asks about processes. Of one process, which has everything: nothing here costs or does anything."""

    #: Whether there are other processes.
    several = False
    #: The layers whose things have one process each.
    layers: Sequence[HasOwners] = ()
    #: What waits for clients, over all connections.
    backlog = Backlog()

    def numbers(self) -> Sequence[Statistics]:
        """What is counted about it."""
        return ()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While this is entered, the processes reach each other."""
        yield

    async def answer(
        self, scope: Scope, receive: Receive, send: Send, *, here: ASGIApp, check: Callable[[Scope], None]
    ) -> None:
        """Answer a request `here`, or relay the answer of the process that has what it is about. Nobody calls it where
        there is one process.

        Args:
            check: called before a request is forwarded, with its body unread; refuses what nobody would let in.

        Raises:
            BadRequest: it says that another process has forwarded it, and how is not readable.
            OwnerUnavailable: the process that has it does not take it.
            OwnerLost: that was lost before its answer began, and may have done what was asked.
        """
        raise NotImplementedError("there is no other process")

    def require(self, scope: Scope, name: str) -> None:
        """Go on only in the process that has what is named so; the request's body was read.

        Raises:
            Elsewhere: another process has it, and answers.
            OwnerUnavailable: another process has sent it here, and this one does not have it.
        """

    def prefer(self, scope: Scope) -> None:
        """Go on only in the process where the key in a request's headers is at home; the request's body was read.

        Raises:
            Elsewhere: another process has it, and answers.
        """

    def is_asked(self, scope: Scope) -> bool:
        """Return whether another process asks this one for its part of an answer (`ask`)."""
        return False

    def is_forwarded(self, scope: Scope) -> bool:
        """Return whether the request is answered here, whatever text it is about: another process has sent it here, or
        its session is here."""
        return False

    def others(self, scope: Scope) -> Sequence[int]:
        """All other processes; none for a request that one of them asks of this one."""
        return ()

    async def ask(
        self, owner: int, scope: Scope, body: bytes, patience: float | None = None, **headers: str
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Have another process answer the same request with this body: status, headers and body.

        Args:
            patience: seconds in which it must have answered; None: the client's own.

        Raises:
            OwnerUnavailable: it cannot be reached, or does not answer in time.
        """
        raise NotImplementedError("there is no other process")

    async def answers(self, scope: Scope) -> list[Any]:
        """What all other processes answer to the same request, which has no body, as JSON.

        Raises:
            OwnerUnavailable: one does not answer: what the others say is not all there is.
        """
        return await self.answers_to(_reading(scope), b"")

    async def answers_to(self, scope: Scope, body: bytes) -> list[Any]:
        """What all other processes answer to a request with this body, as JSON, in the order of `others`.

        Raises:
            OwnerUnavailable: one does not answer: what the others say is not all there is.
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
        """What the first of the other processes answers to the same request with this body that has what it is about;
        None where each says 404.

        Raises:
            OwnerUnavailable: as of `ask`.
        """
        reading = _reading(scope)
        for other in self.others(scope):
            status, headers, answer = await self.ask(other, reading, body)
            if status != 404:
                return status, headers, answer
        return None

    def new_name(self) -> str:
        """A name that nobody can guess, of something that this process is to have."""
        return secrets.token_hex(16)

    def held_names(self, kind: str, capacity: int) -> HeldNames:
        """The names of what a layer holds, at most so many."""
        return HeldNames()

    def own_url(self, base_url: str) -> str | None:
        """Where this process alone is reached, for a client that knows the router by `base_url`."""
        return None


def _reading(scope: Scope) -> Scope:
    """The same request, with GET in place of HEAD: an answer to that has no body to read."""
    return {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
