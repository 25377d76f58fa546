"""Evaluations of single generations: requests with `X-Evaluation: true` pass unrecorded, under one weight version."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from miles_router.engines.answers import MALFORMED, UnreadableAnswer, progress_of, version_runs
from miles_router.errors import WeightsChanged
from miles_router.middlewares import Event, Exchange, Router, Send, Tap, write_event
from miles_router.middlewares.generation import Evaluation


class EvaluationTap(Tap):
    """A relay of answers that breaks off when weights of another version have sampled a part of one."""

    layer = "radix_tree"

    def __init__(self, send: Send, router: Router, exchange: Exchange) -> None:
        super().__init__(send, router.metrics)
        self._pool = router.pool
        self._exchange = exchange
        self._evaluation = exchange.routing.evaluation = Evaluation(router.pool)

    async def whole(self, body: bytes) -> bytes:
        """Return the body unchanged.

        Raises:
            WeightsChanged: the client gets the error instead.
        """
        try:
            reply = orjson.loads(body)
        except orjson.JSONDecodeError:
            reply = None  # an error of the engine
        self._check(reply)
        return body

    async def event(self, event: Event) -> bytes:
        """Return the event unchanged.

        Raises:
            WeightsChanged: the client gets an error event instead, and its connection is closed.
        """
        progress = progress_of(event.data)
        goes_on = progress is not None and progress.finish is None
        try:
            self._check(None if goes_on else event.parse())  # parsing each event of a long answer would be slow
        except WeightsChanged as error:
            await self.give(write_event(error.body(self._exchange.request_id)))
            raise
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
