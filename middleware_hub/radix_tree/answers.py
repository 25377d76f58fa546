"""The relay of the answers to one `/generate` request.

Each answer is recorded before the client has all of it. Logprobs that only the record needs are removed on the way.
"""

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
    ASKS_FOR_MASK,
    INCOMPLETE,
    GenerateAnswer,
    Unreadable,
    UnreadableAnswer,
    require_sampling_mask,
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

#: Why an answer that `GenerateAnswer` accepts is not recorded.
AnswerReason = Literal["answer_count", "incomplete", "prompt_not_read"]


class AnswerTap(Tap):
    """A relay that records the answers to one request.

    An answer that cannot be recorded exactly is counted and logged; the client still gets it.

    Args:
        send: the client's side.
        router: its metrics count unreadable replies.
        recorder: records the answers.
        exchange: the request's exchange.
        request: the request as the client sent it.
        prompts: the tokens that the engine is given for each prompt.
        deliveries: the source of the answers' rows.
        rollouts: the text rollouts that the generations belong to.
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
        #: For each generation, whether the client itself asked for logprobs.
        self._shows_logprobs = [wants_logprobs(request, generation) for generation in self._generations]
        #: The generations of a stream that have not ended; None until the first event.
        self._open_answers: dict[int, GrowingAnswer | None] = dict.fromkeys(self._generations)
        self._without_index = 0 if len(self._generations) == 1 else None
        self._error_event = False  # the engine sent an error event
        self._unexpected_index = False  # an event had an unexpected index
        self._other_events = False  # an event was not part of an answer
        self._invalid_json = False  # an event was not JSON

    async def whole(self, body: bytes) -> bytes:
        """Record the answers in a complete JSON reply; return the body for the client, without logprobs that it did not
        ask for.

        Raises:
            StateError: an answer could not be made durable; the client gets none of them.
            PromptNotRead: the engine read another prompt; no answer is recorded.
        """
        try:
            reply = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            self._pass_unrecorded("not_json", str(error))
            return body
        answers = reply if isinstance(reply, list) else [reply]
        if len(answers) != len(self._generations):
            self._pass_unrecorded(
                "answer_count", f"{len(answers)} answers came for {len(self._generations)} generations"
            )
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
        """Add an event to its answer, and record the answer with its last event; return the bytes for the client.

        Raises:
            StateError: the answer could not be made durable; the client does not get its last event.
            UpstreamBroken: the stream ended before its answers did.
            PromptNotRead: the engine read another prompt; the client gets an error event in place of the last event.
        """
        if event.is_last:
            self._check_ends()
        answer = event.parse()
        if not isinstance(answer, dict) or "output_ids" not in answer:
            self._error_event |= isinstance(answer, dict) and "error" in answer
            self._other_events |= bool(event.data) and not event.is_last
            self._invalid_json |= answer is None and bool(event.data) and not event.is_last
            return event.raw
        generation = answer.get("index", self._without_index)
        if type(generation) is not int or generation not in self._generations:
            if not self._unexpected_index:
                self._pass_unrecorded("answer_count", f"an event has the unexpected index {generation!r}")
            self._unexpected_index = True
            return event.raw
        if generation in self._open_answers:
            try:
                await self._add_event(generation, answer, len(event.data))
            except PromptNotRead as error:
                await self.give(write_event(error.body(self._exchange.request_id)))
                raise
        if self._shows_logprobs[generation]:
            return event.raw
        return write_event(without_logprobs(answer), event.name)

    async def _add_event(self, generation: int, answer: Mapping[str, object], nbytes: int) -> None:
        growing = self._open_answers[generation]
        if growing is None:
            growing = self._open_answers[generation] = GrowingAnswer()
        try:
            growing.add_lazily(answer)
        except UnreadableAnswer as error:
            self._close_answer(generation)
            self._pass_unrecorded(error.reason, str(error))
            return
        self.keep(generation, nbytes, more=growing.incremental is True)
        if growing.ended:
            self._close_answer(generation)
            self._check_prompt(generation, growing.with_versions())
            entry = await self._record(generation, growing.with_versions())
            if entry is not None and entry.family is not None:
                await self.give_shown()
                await self._recorder.archive.save([entry])

    def _close_answer(self, generation: int) -> None:
        del self._open_answers[generation]
        self.keep(generation, 0, more=False)

    def unread(self, reason: str) -> None:
        """Count an unreadable reply, and stop recording: no answer that has begun is recorded."""
        super().unread(reason)
        self._open_answers.clear()

    async def ended(self) -> bytes:
        """Check that all answers have ended. Raises the same errors as `event`."""
        self._check_ends()
        return b""

    def _check_ends(self) -> None:
        """Count the answers of a stream that did not end, unless the engine sent an error.

        Streams with events that are not part of an answer pass.

        Raises:
            UpstreamBroken: some answers did not end; the client must not take the stream as complete.
        """
        cut = [] if self._error_event else [*self._open_answers]
        for generation in cut:
            if self._invalid_json:
                self._pass_unrecorded(
                    "not_json", f"an event of answer {generation} is not JSON, which has no NaN and Infinity"
                )
            else:
                self._pass_unrecorded("incomplete", f"the stream ended before answer {generation} did")
        self._open_answers.clear()
        if cut and not (self._other_events or self._unexpected_index):
            raise UpstreamBroken(f"the worker's stream ended before its answers did: {cut}")

    def _check_prompt(self, generation: int, answer: Any) -> None:
        """Compare the length of the prompt with the number of prompt tokens that the engine reports.

        Raises:
            PromptNotRead: the lengths differ.
        """
        given = len(self._prompts[self._request.prompt_of(generation)].trajectory)
        read = token_count(answer.get("meta_info")) if _has_begun(answer) else None
        if read is not None and read != given:
            self._recorder.statistics.passed_through["prompt_not_read"] += 1
            raise PromptNotRead.of(self._exchange.routing.worker_url, given, read)

    async def _record(self, generation: int, answer: Any) -> Entry | None:
        prompt = self._request.prompt_of(generation)
        take = partial(self._deliveries.take, generation)
        try:
            read = GenerateAnswer.read(answer)
            if self._request.field(ASKS_FOR_MASK, prompt):
                require_sampling_mask(read.sampling_mask, read.ids)
            params, routing = self._request.prompts[prompt].params, self._exchange.routing
            version = read.versions[-1].version if read.versions else None
            routing.mark("answer", tokens=len(read.ids), finish=read.finish, version=version, rid=read.rid)
            nothing_found = len(routing.caches) == 1 and answer["meta_info"].get("cached_tokens") == 0
            entry = await self._recorder.record(
                self._prompts[prompt],
                params,
                read,
                take,
                cache=routing.cache,
                cache_versions=() if nothing_found else routing.cache_versions,
                asked=AskedSampling.of_generate(self._request, prompt, self._exchange.adapter),
                worker=routing.worker_url,
            )
            if entry is not None:
                self._rollouts.record_turn(generation, self._prompts[prompt], entry, answer["meta_info"])
            return entry
        except UnreadableAnswer as error:
            self._pass_unrecorded(error.reason, str(error))
        except InvalidTrajectory as error:
            self._pass_unrecorded("invalid_tokens", str(error))
        return None

    def _pass_unrecorded(self, reason: AnswerReason | Unreadable, detail: str) -> None:
        self._recorder.statistics.passed_through[reason] += 1
        worker, request_id = self._exchange.routing.worker_url, self._exchange.request_id
        if reason not in ("answer_count", INCOMPLETE):
            flag_worker(self._recorder.statistics.invalid_answers, worker)
        fields = {"request_id": request_id, "worker": worker, "reason": reason, "detail": detail}
        logger.warning("answer_not_recorded", extra={"fields": fields})


def _has_begun(answer: Any) -> bool:
    """Return False for an answer that was aborted before its first token: the engine may not have read its prompt."""
    if not isinstance(answer, dict) or answer.get("output_ids"):
        return isinstance(answer, dict)
    meta = answer.get("meta_info")
    finish = meta.get("finish_reason") if isinstance(meta, dict) else None
    return isinstance(finish, dict) and finish.get("type") != "abort"
