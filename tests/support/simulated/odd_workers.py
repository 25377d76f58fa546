"""Simulated workers with a single oddity each; several of them combine as base classes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from aiohttp import web

from miles_router.testing import Engine, SimulatedWorker
from miles_router.testing.worker.model.generation import GenerationRequest, Model
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
