"""Simulated workers with a single oddity each; several of them combine as base classes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from aiohttp import web

from miles_router.testing import Engine, SimulatedWorker
from miles_router.testing.worker.model.generation import GenerationRequest, Model
from miles_router.testing.worker.model.prefix_cache import PrefixCache
from miles_router.testing.worker.reply import Reply
from miles_router.testing.worker.wire.generate_input import LethalPrompt


class _SpacedReply(Reply):
    def encode(self, value: Any) -> bytes:
        return json.dumps(value, ensure_ascii=False).encode()


class SpacedWorker(SimulatedWorker):
    """A worker that writes spaces between the parts of its JSON."""

    reply_type = _SpacedReply


class MortalWorker(SimulatedWorker):
    """A worker that shuts down on a request that crashes a real one."""

    async def crash(self, reply: Reply, error: LethalPrompt) -> web.StreamResponse:
        reply.cut = True
        await self.kill()
        return await super().crash(reply, error)


class _DeafEngine(Engine):
    def _rank(self, request: GenerationRequest) -> int | None:
        return super()._rank(replace(request, routed_dp_rank=None))


class RankDeafWorker(SimulatedWorker):
    """A worker that distributes requests that are pinned to a rank like all others."""

    def make_engine(self, model: Model, **options: Any) -> Engine:
        return _DeafEngine(model, **options)


class WatchedCache(PrefixCache):
    """A prefix cache that notes which weights computed the entries that generations reuse.

    Attributes:
        reused: pairs of weight versions: that of an entry, and that of the generation that reused it.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.reused: set[tuple[str, str]] = set()
        self._engine = engine
        self._computed_by: dict[int, str] = {}

    def match(self, ids: Sequence[int], key: str = "") -> int:
        known = super().match(ids, key)
        found = {self._computed_by[prefix] for prefix in _prefixes(ids[:known], key)}
        self.reused |= {(version, self._engine.weight_version) for version in found}
        return known

    def insert(self, ids: Sequence[int], key: str = "") -> None:
        super().insert(ids, key)
        for prefix in _prefixes(ids, key):
            self._computed_by.setdefault(prefix, self._engine.weight_version)

    def clear(self) -> None:
        super().clear()
        self._computed_by.clear()


def _prefixes(ids: Sequence[int], key: str) -> Iterator[int]:
    prefix = hash(key)
    for token in ids:
        prefix = hash((prefix, token))
        yield prefix


class WatchedWorker(SimulatedWorker):
    """A worker whose prefix cache is watched."""

    def make_engine(self, model: Model, **options: Any) -> Engine:
        engine = super().make_engine(model, **options)
        engine.cache = self.cache = WatchedCache(engine)
        return engine
