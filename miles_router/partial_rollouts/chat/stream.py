"""A turn of chat whose answer comes chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_router.engines.answers import UnreadableAnswer, version_runs
from miles_router.engines.chat_legs import entries_of, finished, joined_usage
from miles_router.engines.chat_rest import deltas_behind
from miles_router.engines.events import LAST_EVENT, write_event
from miles_router.engines.rows import ROW_FIELDS
from miles_router.errors import RouterError
from miles_router.middlewares.chat import KnownVersions
from miles_router.partial_rollouts.chat.answer import ChatLegs
from miles_router.partial_rollouts.chat.generation import ChatGeneration
from miles_router.partial_rollouts.chat.opening import OpeningChatStream
from miles_router.partial_rollouts.generation import CannotResume
from miles_router.partial_rollouts.leg import Leg


class ResumableChatStream(ChatLegs):
    """A turn whose answer comes chunk by chunk. What its client has seen stays: one that cannot be carried on ends with
    the finish reason `abort`."""

    async def run(self, body: bytes) -> None:
        self.opening = opening = OpeningChatStream(self, Leg(self.context, self.exchange))
        with self.in_flight(self.exchange, body):
            await opening.leg.ask(opening, self.scope, self.receive, body)
        if not opening.is_cut:
            return
        cut = [index for index, choice in sorted(opening.choices.items()) if choice.cut]
        known = await self._by_engine(cut)
        try:
            generations = [self._begun(index) for index in cut]
            answers = await self.carried_on(generations)
        except (CannotResume, UnreadableAnswer) as error:
            self.give_up(error)
            answers = {}
        for index in cut:
            await opening.give(await self._rest(index, answers.get(index), known=known))
        await opening.give(self._end(answers))
        await opening.finish(LAST_EVENT)

    async def _by_engine(self, cut: list[int]) -> bool:
        """Whether the engine itself says that it has the weights that the router noted while it streamed."""
        url = self.exchange.flight.worker_url
        runs = [run for index in cut for run in self.opening.choices[index].versions.runs]
        versions = {run.version for run in runs}
        if url is None or len(versions) != 1:
            return False
        try:
            return await self.questions().weight_version(url) in versions
        except RouterError:
            return False

    def _begun(self, index: int) -> ChatGeneration:
        opening = self.opening
        prompt = self.fields.get("input_ids") or opening.extension.get("input_ids")
        if not prompt:
            raise CannotResume("the worker did not tell the ids of the prompt")
        generation = ChatGeneration(self.fields, index, prompt, opening.leg.facts)
        answer = opening.leg_of_choice(index, len(prompt))
        generation.begin(answer)
        generation.abort = answer["meta_info"]["finish_reason"]
        return generation

    async def _rest(self, index: int, answer: Mapping[str, Any] | None, *, known: bool) -> bytes:
        """The chunks that are left of a choice."""
        choice = self.opening.choices[index]
        if answer is None:
            return self._chunk(index, {}, finish_reason="abort", matched_stop=None)
        self.turn.versions[index] = KnownVersions(version_runs(answer["meta_info"], len(answer["output_ids"])), known)
        left = entries_of(answer)[len(choice.entries) :]
        chunks = [self._chunk(index, {"reasoning_content": None}, logprobs={"content": left})] if left else []
        try:
            read = await self.reader.read(answer, choice.message.message(), self.opening.leg.facts, self.questions())
            finish = finished(answer, read.message)
            chunks += [self._chunk(index, delta) for delta in deltas_behind(choice.message.message(), *read)]
        except (CannotResume, UnreadableAnswer, RouterError) as error:
            self.give_up(error)
            finish = {"type": "abort"}
        chunks.append(
            self._chunk(
                index, {"reasoning_content": None}, finish_reason=finish["type"], matched_stop=finish.get("matched")
            )
        )
        return b"".join(chunks)

    def _end(self, answers: Mapping[int, Any]) -> bytes:
        """What the stream says of all choices at its end."""
        opening, chunks = self.opening, b""
        extension = {**opening.extension}
        if extension.get("output_ids"):
            extension["output_ids"] = [
                answers[index]["output_ids"] if index in answers else ids
                for index, ids in enumerate(extension["output_ids"])
            ]
        for name in (each.rows.name for each in ROW_FIELDS.values()):
            rows = [each["meta_info"][name] for each in answers.values() if each["meta_info"].get(name)]
            extension |= {name: rows[0]} if rows else {}
        if extension:
            chunks += write_event({**opening.envelope, "choices": [], "usage": None, "sglext": extension})
        if opening.usage is not None:
            metas = [self._meta(index, answers) for index in sorted(opening.choices)]
            usage = joined_usage(opening.usage, metas)
            chunks += write_event({**opening.envelope, "choices": [], "usage": usage})
        return chunks

    def _meta(self, index: int, answers: Mapping[int, Any]) -> Mapping[str, Any]:
        if index in answers:
            meta: Mapping[str, Any] = answers[index]["meta_info"]
            return meta
        return {"completion_tokens": len(self.opening.choices[index].entries)}

    def _chunk(self, index: int, delta: Mapping[str, Any], **fields: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, "matched_stop": None}
        return write_event({**self.opening.envelope, "choices": [{**choice, **fields}]})
