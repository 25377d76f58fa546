"""The answers to one request, on their way to the client: each is recorded before the client has all of it, and given
on without the logprobs that only the record asked for."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import orjson

from middleware_hub.radix_tree.dashboard.rollouts import RunningRollouts
from middleware_hub.radix_tree.entry import Entry
from middleware_hub.radix_tree.recording import TextRecorder, TokenizedText
from middleware_hub.radix_tree.requests import wants_logprobs
from miles_router.engines.answers import (
    INCOMPLETE,
    GenerateAnswer,
    Unreadable,
    UnreadableAnswer,
    token_count,
    without_logprobs,
)
from miles_router.engines.growing import GrowingAnswer
from miles_router.engines.recomputing import AskedSampling
from miles_router.errors import PromptNotRead, UpstreamBroken
from miles_router.middlewares import Event, Exchange, GenerateRequest, Router, Send, Tap, write_event
from miles_router.middlewares.generation import flag_worker
from miles_router.middlewares.rows import RowDeliveries
from miles_router.trajectory import InvalidTrajectory

logger = logging.getLogger(__name__)

#: Why an answer is not recorded that `GenerateAnswer` does not refuse.
AnswerReason = Literal["answer_count", "incomplete", "prompt_not_read"]


class AnswerTap(Tap):
    """Records the answers to one request. An answer that cannot be recorded exactly is counted and logged, and its
    client gets it all the same.

    Args:
        send: the client's side.
        router: counts replies that cannot be read.
        recorder: where the answers go.
        exchange: the request's record, for the log.
        request: as the client sent it.
        prompts: what the engine is given for each of its prompts.
        deliveries: where the answers' rows come from.
        rollouts: what the generations are part of.
    """

    layer = "radix_tree"

    def __init__(
        self,
        send: Send,
        router: Router,
        recorder: TextRecorder,
        exchange: Exchange,
        request: GenerateRequest,
        prompts: Sequence[TokenizedText],
        deliveries: RowDeliveries,
        rollouts: RunningRollouts,
    ) -> None:
        super().__init__(send, router.metrics)
        self._recorder = recorder
        self._exchange = exchange
        self._request = request
        self._prompts = prompts
        self._deliveries = deliveries
        self._rollouts = rollouts
        self._generations = range(request.generations)
        #: For each of them, whether its client asked for logprobs itself.
        self._shows_logprobs = [wants_logprobs(request, generation) for generation in self._generations]
        #: Of a stream: those that have not ended; None where nothing has come.
        self._growing: dict[int, GrowingAnswer | None] = dict.fromkeys(self._generations)
        self._without_index = 0 if len(self._generations) == 1 else None
        self._failed = False  # the engine says itself that there is no answer
        self._surplus = False  # events came of answers that nobody asked for
        self._odd = False  # events came that are of no answer
        self._unreadable = False  # events came that are no JSON

    async def whole(self, body: bytes) -> bytes:
        """Record the answers of a JSON reply.

        Raises:
            StateError: they cannot be made to outlive the process; the client is given none of them.
            PromptNotRead: the engine read another prompt; none is recorded.
        """
        try:
            reply = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            self._refuse("not_json", str(error))
            return body
        answers = reply if isinstance(reply, list) else [reply]
        if len(answers) != len(self._generations):
            self._refuse("answer_count", f"{len(answers)} answers to {len(self._generations)} generations")
            return body
        for generation, answer in enumerate(answers):
            self._check_prompt(generation, answer)
        recorded = [await self._record(generation, answer) for generation, answer in enumerate(answers)]
        await self._recorder.archive.save(filter(None, recorded))
        if all(self._shows_logprobs):
            return body
        for generation, shows in enumerate(self._shows_logprobs):
            if not shows:
                answers[generation] = without_logprobs(answers[generation])
        return orjson.dumps(answers if isinstance(reply, list) else answers[0])

    async def event(self, event: Event) -> bytes:
        """Take what an event says of its answer, and record the answer with the last one.

        Raises:
            StateError: it cannot be made to outlive the process; the client is not given its last event.
            UpstreamBroken: the stream ends, and its answers have not.
            PromptNotRead: the engine read another prompt; the client is told so in an event in place of the last.
        """
        if event.is_last:
            self._end()
        answer = event.parse()
        if not isinstance(answer, dict) or "output_ids" not in answer:
            self._failed |= isinstance(answer, dict) and "error" in answer
            self._odd |= bool(event.data) and not event.is_last
            self._unreadable |= answer is None and bool(event.data) and not event.is_last
            return event.raw
        generation = answer.get("index", self._without_index)
        if type(generation) is not int or generation not in self._generations:
            if not self._surplus:
                self._refuse("answer_count", f"an event of answer {generation!r}")
            self._surplus = True
            return event.raw
        if generation in self._growing:
            try:
                await self._grow(generation, answer, len(event.data))
            except PromptNotRead as error:
                await self.give(write_event(error.body(self._exchange.request_id)))
                raise
        if self._shows_logprobs[generation]:
            return event.raw
        return write_event(without_logprobs(answer), event.name)

    async def _grow(self, generation: int, answer: Mapping[str, object], nbytes: int) -> None:
        growing = self._growing[generation]
        if growing is None:
            growing = self._growing[generation] = GrowingAnswer()
        try:
            growing.skim(answer)
        except UnreadableAnswer as error:
            self._forget(generation)
            self._refuse(error.reason, str(error))
            return
        self.keep(generation, nbytes, more=growing.incremental is True)
        if growing.ended:
            self._forget(generation)
            self._check_prompt(generation, growing.with_versions())
            entry = await self._record(generation, growing.with_versions())
            if entry is not None and entry.family is not None:
                await self.give_shown()
                await self._recorder.archive.save([entry])

    def _forget(self, generation: int) -> None:
        del self._growing[generation]
        self.keep(generation, 0, more=False)

    def unread(self, reason: str) -> None:
        """None of what has come is recorded."""
        super().unread(reason)
        self._growing.clear()

    async def ended(self) -> bytes:
        """See that all answers have ended. Raises as `event`."""
        self._end()
        return b""

    def _end(self) -> None:
        """Count the answers that did not end, unless the engine has said why; their client learns that it has not all.
        What is no stream of answers passes.

        Raises:
            UpstreamBroken: some did not end.
        """
        cut = [] if self._failed else [*self._growing]
        for generation in cut:
            if self._unreadable:
                self._refuse(
                    "not_json", f"an event of answer {generation} is no JSON, or has a number that JSON has not"
                )
            else:
                self._refuse("incomplete", f"the stream ended before answer {generation} did")
        self._growing.clear()
        if cut and not (self._odd or self._surplus):
            raise UpstreamBroken(f"the worker's stream ended before its answers did: {cut}")

    def _check_prompt(self, generation: int, answer: Any) -> None:
        """Compare how long the prompt was and what the engine says that it read of it.

        Raises:
            PromptNotRead: they differ.
        """
        given = len(self._prompts[self._request.prompt_of(generation)].trajectory)
        read = token_count(answer.get("meta_info")) if _has_begun(answer) else None
        if read is not None and read != given:
            self._recorder.statistics.passed_through["prompt_not_read"] += 1
            raise PromptNotRead.of(self._exchange.flight.worker_url, given, read)

    async def _record(self, generation: int, answer: Any) -> Entry | None:
        prompt = self._request.prompt_of(generation)
        take = partial(self._deliveries.take, generation)
        try:
            read = GenerateAnswer.read(answer)
            params, flight = self._request.prompts[prompt].params, self._exchange.flight
            version = read.versions[-1].version if read.versions else None
            flight.mark("answer", tokens=len(read.ids), finish=read.finish, version=version, rid=read.rid)
            nothing_found = len(flight.caches) == 1 and answer["meta_info"].get("cached_tokens") == 0
            entry = await self._recorder.record(
                self._prompts[prompt],
                params,
                read,
                take,
                cache=flight.cache,
                cache_versions=() if nothing_found else flight.cache_versions,
                asked=AskedSampling.of_generate(self._request, prompt, self._exchange.adapter),
                worker=flight.worker_url,
            )
            if entry is not None:
                self._rollouts.recorded(generation, self._prompts[prompt], entry, answer["meta_info"])
            return entry
        except UnreadableAnswer as error:
            self._refuse(error.reason, str(error))
        except InvalidTrajectory as error:
            self._refuse("invalid_tokens", str(error))
        return None

    def _refuse(self, reason: AnswerReason | Unreadable, detail: str) -> None:
        self._recorder.statistics.passed_through[reason] += 1
        worker, request_id = self._exchange.flight.worker_url, self._exchange.request_id
        if reason not in ("answer_count", INCOMPLETE):
            flag_worker(self._recorder.statistics.invalid_answers, worker)
        fields = {"request_id": request_id, "worker": worker, "reason": reason, "detail": detail}
        logger.warning("answer_not_recorded", extra={"fields": fields})


def _has_begun(answer: Any) -> bool:
    """Return False for an answer that was aborted before its first token: its prompt may not have been read."""
    if not isinstance(answer, dict) or answer.get("output_ids"):
        return isinstance(answer, dict)
    meta = answer.get("meta_info")
    finish = meta.get("finish_reason") if isinstance(meta, dict) else None
    return isinstance(finish, dict) and finish.get("type") != "abort"
