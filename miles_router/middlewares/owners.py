"""Whose a session or a text is, where a router is several processes; and what of it was lost with one of them."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson

from miles_router.asgi.exchange import Scope
from miles_router.errors import OwnerUnavailable
from miles_router.metrics import Statistics
from miles_router.middlewares.contract import HasOwners
from miles_router.middlewares.roots import Root


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

    def numbers(self) -> Sequence[Statistics]:
        """What is counted about it."""
        return ()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While this is entered, the processes reach each other."""
        yield

    def require(self, scope: Scope, name: str) -> None:
        """Go on only in the process that has what is named so; the request's body was read.

        Raises:
            Elsewhere: another process has it, and answers.
        """

    async def require_text(self, scope: Scope, texts: Sequence[str], continues: Callable[[str], bool]) -> None:
        """Go on only in the process that has what these texts continue, or is to have them; the request's body was
        read. `continues` tells whether a text goes on from something that is held here.

        Raises:
            Elsewhere: another process has them, and answers.
        """

    def hold_texts(self, roots: Sequence[Root]) -> None:
        """Said before `running` is entered: texts outlive processes, and this one has those of these roots, the newest
        last. Who is asked for one of them while its process is started again waits for that."""

    async def owner_of_text(self, scope: Scope, text: str) -> int | None:
        """The other process that has what this text continues; None where it is this one, or nobody."""
        return None

    def others(self, scope: Scope) -> Sequence[int]:
        """All other processes; none for a request that one of them asks of this one."""
        return ()

    async def ask(self, owner: int, scope: Scope, body: bytes, **headers: str) -> tuple[int, Mapping[str, str], bytes]:
        """Have another process answer the same request with this body: status, headers and body.

        Raises:
            OwnerUnavailable: it cannot be reached.
        """
        raise NotImplementedError("there is no other process")

    async def answers(self, scope: Scope) -> list[Any]:
        """What all other processes answer to the same request, which has no body, as JSON.

        Raises:
            OwnerUnavailable: one does not answer: what the others say is not all there is.
        """
        found, reading = [], _reading(scope)
        for other in self.others(scope):
            status, _, body = await self.ask(other, reading, b"")
            if status != 200:
                raise OwnerUnavailable(f"process {other} answers {status}")
            found.append(orjson.loads(body))
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
