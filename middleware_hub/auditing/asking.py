"""Asks engines for the logprobs of recorded tokens.

The requests enter the fleet as a layer's own: they wait at the gate and count as in flight, and no layer records them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

from miles_router.engines import paths, recomputing
from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.facts import Facts
from miles_router.engines.recomputing import Likeliest, RecomputationCut, Recomputed
from miles_router.middlewares import Router
from miles_router.trajectory.pieces import Logprobs, Tokens

#: The most audit requests that a router runs at once.
AUDITS_AT_ONCE = 2
#: Attempts for a request that a pause cuts.
TRIES = 3
#: Tokens at the end of the context window that no prompt may use.
RESERVED = 8
#: The most bytes of an answer, for each id and for the rest; and up to which size it is parsed on the event loop.
BYTES_PER_ID, BYTES_BESIDE, READ_HERE = 256, 1 << 20, 1 << 18
JSON = [(b"content-type", b"application/json")]
REFUSED, CUT, UNREADABLE, OTHER_WEIGHTS = "refused", "cut", "unreadable", "other_weights"


class NotRecomputed(Exception):
    """No engine returned the logprobs.

    Attributes:
        reason: a code.
        message: the engine's own message, or empty.
        status: the status of the engine's refusal, or None.
    """

    def __init__(self, reason: str, message: str = "", status: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.message = message
        self.status = status


class Recomputation(NamedTuple):
    """Recomputed logprobs, the URL of the worker that computed them, its weight version, and the likeliest tokens
    (None: not requested)."""

    logprobs: Logprobs
    worker: str
    version: str | None
    likeliest: Likeliest | None


class Asker:
    """A client for the engines of one pool, shared by all layers, that runs `at_once` requests at a time."""

    def __init__(self, router: Router, at_once: int = AUDITS_AT_ONCE) -> None:
        self._router = router
        self._at_once = asyncio.Semaphore(at_once)

    @property
    def weight_version(self) -> str | None:
        """The fleet's weight version."""
        return self._router.pool.weight_version

    async def longest_prompt(self) -> int:
        """Return the longest prompt, in tokens, that every engine accepts."""
        known = [facts.context_length for facts in await self._router.fleet.all_facts()]
        windows = [length for length in known if length is not None]
        return max(0, min(windows) - RESERVED) if windows else 1 << 31

    async def sampling_defaults(self, worker: str | None, *, chat: bool) -> list[Mapping[str, Any]]:
        """Return the sampling defaults of the engine that sampled a generation; of all engines if that worker is gone.

        Args:
            worker: its URL.
            chat: whether it was a chat request.
        """
        fleet, pool = self._router.fleet, self._router.pool
        there = worker is not None and pool.find(worker) is not None
        known = [await fleet.facts(str(worker))] if there else await fleet.all_facts()
        of_model = self._router.generation_config
        return [
            each for facts in known or [Facts()] for each in recomputing.possible_defaults(facts, of_model, chat=chat)
        ]

    async def recompute(
        self,
        ids: Tokens,
        start: int,
        adapter: str = "",
        version: str | None = None,
        avoided: Collection[str] = (),
        top_k: int = 0,
    ) -> Recomputation:
        """Return the logprobs of `ids[start + 1 :]`.

        Args:
            version: the weight version that must compute them; None: any one.
            avoided: URLs of workers that should not be asked, if others are free.
            top_k: how many of the likeliest tokens to return for each position.

        Raises:
            NotRecomputed: no engine returned them.
            RouterError: no worker can be asked.
        """
        wanted = ids[start:].tolist()
        body = recomputing.request(ids, start, adapter, top_k)
        limit = BYTES_BESIDE + BYTES_PER_ID * len(wanted) * (1 + top_k)
        return await self._ask(body, limit, partial(recomputing.read, ids=wanted, top_k=top_k), version, avoided)

    async def recompute_next(
        self, ids: Tokens, token: int, temperature: float, adapter: str, version: str, avoided: Collection[str]
    ) -> Recomputation:
        """Return the logprob of one token that follows these ids, at a temperature.

        Args:
            avoided: URLs of workers that should not be asked, if others are free.

        Raises:
            NotRecomputed: no engine returned it.
            RouterError: no worker can be asked.
        """
        body = recomputing.request_next(ids, token, temperature, adapter)
        return await self._ask(body, BYTES_BESIDE, partial(recomputing.read_next, token=token), version, avoided)

    async def _ask(
        self,
        body: bytes,
        limit: int,
        read: Callable[[bytes], Recomputed],
        version: str | None,
        avoided: Collection[str],
    ) -> Recomputation:
        for _ in range(TRIES):
            async with self._at_once:
                status, answer, worker = await self._forward(body, limit, avoided)
            if status != 200:
                raise NotRecomputed(REFUSED, answer.decode("utf-8", "replace"), status)
            try:
                found = await asyncio.to_thread(read, answer) if len(answer) > READ_HERE else read(answer)
            except RecomputationCut:
                continue
            except UnreadableAnswer as error:
                raise NotRecomputed(UNREADABLE, str(error)) from None
            computed_by = found.version or self._router.pool.version_of(worker)
            if version is not None and computed_by != version:  # weights changed meanwhile
                raise NotRecomputed(OTHER_WEIGHTS)
            return Recomputation(found.logprobs, worker, computed_by, found.likeliest)
        raise NotRecomputed(CUT)

    async def _forward(self, body: bytes, limit: int, avoided: Collection[str]) -> tuple[int, bytes, str]:
        preferred = self._worker_besides(avoided)
        async with self._router.forward(
            "POST", paths.GENERATE, headers=JSON, body=body, preferred=preferred
        ) as forwarded:
            return forwarded.reply.status, await forwarded.reply.read_all(limit), str(forwarded.worker.url)

    def _worker_besides(self, avoided: Collection[str]) -> str | None:
        """Return the worker with the fewest requests that is not one of these, or None. A worker whose weights are not
        what it reports would agree with itself, so another worker should recompute."""
        snapshot = self._router.pool.snapshot
        if snapshot.prefill:
            return None
        free = [unit for unit in snapshot.generating if unit.worker.url not in avoided]
        least = min(free, key=lambda unit: unit.in_flight, default=None)
        return None if least is None else str(least.worker.url)
