"""The requests of one pool across all shards, for the leader's control code."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from miles_router.control.requests import Aborted, GroupEnd
from miles_router.errors import StateError
from miles_router.shards.coordinator import ShardCoordinator


class AllRequests:
    """An implementation of `control.requests.Requests` that asks every shard."""

    def __init__(self, pool: str, coordinator: ShardCoordinator) -> None:
        self._pool = pool
        self._coordinator = coordinator

    async def abort(self, rid: str | None) -> list[Aborted]:
        """Mark the requests that an abort matches, in all shards, and return them.

        If one shard has a request with exactly this id, requests in other shards whose id begins with it match too.
        """
        places = [] if rid is None else await self._ask("workers_with", rid=rid)
        return _read(await self._ask("abort", rid=rid, elsewhere=places))

    async def end_group(self, group: str | int) -> GroupEnd:
        """End the requests of a group in all shards; return the aborted requests and the failures."""
        ended = await self._ask("end_group", group=group)
        aborted = [each for found, _ in ended for each in found]
        return GroupEnd(_read(aborted), [StateError.read(each) for _, failures in ended for each in failures])

    async def ids_at(self, url: str) -> Collection[str]:
        """Return the ids of the requests on a worker, from all shards."""
        return set(await self._ask("ids_at", url=url))

    async def _ask(self, message_type: str, **fields: Any) -> list[Any]:
        answers = await self._coordinator.ask_all(message_type, pool=self._pool, **fields)
        return [each for answer in answers for each in answer.fields["found"]]


def _read(found: Iterable[list[Any]]) -> list[Aborted]:
    return [Aborted(urls, names, renamed) for urls, names, renamed in found]
