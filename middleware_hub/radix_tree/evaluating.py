"""Evaluations of single generations: requests with `X-Evaluation: true` pass unrecorded, under one weight version."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import orjson

from miles_router.engines.answers import MALFORMED, UnreadableAnswer, progress_of, version_runs
from miles_router.engines.json_bytes import read_json
from miles_router.engines.models import own_adapters
from miles_router.errors import WeightsChanged
from miles_router.middlewares import Event, Exchange, Kind, Receive, Router, Scope, Send, Tap, write_event
from miles_router.middlewares.generation import Evaluation


class EvaluationTap(Tap):
    """A relay of answers that breaks off when weights of another version have sampled a part of one."""

    layer = "radix_tree"

    def __init__(self, send: Send, router: Router, exchange: Exchange, body: bytes) -> None:
        super().__init__(send, router.metrics)
        self._pool = router.pool
        self._exchange = exchange
        own = own_adapters(body, read_json) or exchange.adapter
        adapters = [each for each in (own if isinstance(own, list) else [own]) if each and isinstance(each, str)]
        self._evaluation = exchange.routing.evaluation = Evaluation(router.fleet, adapters=adapters)

    async def call(
        self, app: Callable[[Scope, Receive, Send], Awaitable[None]], scope: Scope, receive: Receive
    ) -> None:
        """Forward the request, and relay its reply.

        Raises:
            WeightsChanged: a stream that has begun ends with an error event, and its connection is closed.
        """
        try:
            await super().call(app, scope, receive)
        except WeightsChanged as error:
            if self.kind is Kind.EVENTS:
                await self.give(write_event(error.body(self._exchange.request_id)))
            raise

    async def whole(self, body: bytes) -> bytes:
        """Return the body unchanged. Raises like `call`."""
        try:
            reply = orjson.loads(body)
        except orjson.JSONDecodeError:
            reply = None  # an error of the engine
        self._check(reply)
        return body

    async def event(self, event: Event) -> bytes:
        """Return the event unchanged. Raises like `call`."""
        progress = progress_of(event.data)
        unfinished = progress is not None and progress.finish is None
        self._check(None if unfinished else event.parse())  # parsing each event of a long answer would be slow
        return event.raw

    def _check(self, reply: object) -> None:
        seen = self._pool.version_of(self._exchange.routing.worker_url)
        self._evaluation.check(seen, *_versions(reply))


def _versions(reply: object) -> Iterator[str]:
    """Yield the weight versions that the answers of a reply or of an event name."""
    answers: list[Any] = reply if isinstance(reply, list) else [reply]
    for answer in answers:
        try:
            yield from (run.version for run in version_runs(answer["meta_info"], len(answer["output_ids"])))
        except (UnreadableAnswer, *MALFORMED):
            continue  # not an answer, or one without versions
