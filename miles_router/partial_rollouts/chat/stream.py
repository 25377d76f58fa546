"""A turn of chat whose answer comes chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from miles_router.asgi.exchange import Message, Send
from miles_router.asgi.watch import Watch
from miles_router.engines.answers import UnreadableAnswer, version_runs
from miles_router.engines.events import LAST_EVENT, write_event
from miles_router.engines.facts import Facts
from miles_router.engines.generate import stop_strings
from miles_router.engines.openai.legs import entries_of, finished, joined_usage
from miles_router.engines.openai.text_reader import LiveText
from miles_router.errors import RouterError, UpstreamBroken
from miles_router.middlewares.chat import KnownVersions
from miles_router.partial_rollouts.chat.answer import ChatLegs
from miles_router.partial_rollouts.chat.following import FollowingChat
from miles_router.partial_rollouts.chat.generation import ChatGeneration
from miles_router.partial_rollouts.chat.opening import OpeningChatStream, ShownChoice
from miles_router.partial_rollouts.generation import CannotResume, ResumableGeneration
from miles_router.partial_rollouts.joining import ROWS
from miles_router.partial_rollouts.leg import Leg
from miles_router.partial_rollouts.seam import Seam


class ResumableChatStream(ChatLegs):
    """A turn whose answer comes chunk by chunk. What its client has seen stays: one that cannot be carried on ends with
    the finish reason `abort`."""

    async def run(self, body: bytes) -> None:
        opening = await self._first_stream(body)
        if not opening.is_cut:
            return
        cut = [index for index, choice in sorted(opening.choices.items()) if choice.cut]
        self.turn.carried.update(cut)
        self._live: dict[int, LiveText] = {}
        self._by_engine = await self._said_by_engine(self.exchange.flight.worker_url, map(opening.choices.get, cut))
        try:
            generations = [await self._begun(index) for index in cut]
            answers = await self.carried_on(generations)
        except (CannotResume, UnreadableAnswer) as error:
            self.give_up(error)
            answers = {}
        for index in cut:
            await opening.give(await self._rest(index, answers.get(index)))
        await opening.give(self._end(answers))
        await opening.finish(LAST_EVENT)

    async def _first_stream(self, body: bytes) -> OpeningChatStream:
        """The stream that it begins with; under `resume_lost`, one that had said nothing is asked for again.

        Raises:
            UpstreamBroken: its worker was lost, and what it said is nothing to go on from.
        """
        lost, start = 0, _OneStart(self.send)
        while True:
            leg = Leg(self.context, self.exchange)
            most, stops = self.fields.get("n") or 1, stop_strings(self.fields.get("stop"))
            self.opening = opening = OpeningChatStream(start.send, self.context, leg, most, stops)
            try:
                with self.in_flight(self.exchange, body):
                    await opening.leg.ask(opening, self.scope, self.receive, body)
                return opening
            except UpstreamBroken:
                lost += 1
                if not self.context.resume_lost or lost > self.context.router.config.max_retries:
                    raise
                if opening.choices or opening.passing:
                    await self._lose(opening)
                    return opening
                body = self.renamed(body)

    async def _lose(self, opening: OpeningChatStream) -> None:
        try:
            if not opening.lose():
                raise CannotResume("what it said cannot be read")
            await opening.name_ids(self.turn)
            if not (self.fields.get("input_ids") or opening.extension.get("input_ids")):
                opening.extension["input_ids"] = await self.questions().render(self.fields)
        except (CannotResume, RouterError) as error:
            self.give_up(error)
            raise UpstreamBroken(f"the worker was lost: {error}") from error
        if opening.leg.facts.model_path is None:
            opening.leg.facts = next(iter(await self.context.router.fleet.all_facts()), Facts())

    async def _said_by_engine(self, url: str | None, choices: Iterable[ShownChoice | None]) -> bool:
        """Whether the engine itself says that it has the weights that the router noted while it streamed."""
        versions = {run.version for choice in choices if choice is not None for run in choice.versions.runs}
        return (
            url is not None and len(versions) == 1 and await self.context.router.fleet.weight_version(url) in versions
        )

    async def _begun(self, index: int) -> ChatGeneration:
        opening = self.opening
        prompt = self.fields.get("input_ids") or opening.extension.get("input_ids")
        if not prompt:
            raise CannotResume("the worker did not tell the ids of the prompt")
        generation = ChatGeneration(self.fields, index, prompt, opening.leg.facts)
        answer = opening.leg_of_choice(index, len(prompt))
        generation.begin(answer)
        generation.abort = answer["meta_info"]["finish_reason"]
        self._watch(generation)
        return generation

    # What follows, as it comes

    def _watch(self, generation: ChatGeneration) -> None:
        """See whether what follows can be read as it comes: once something was shown of it."""
        index, choice = generation.index, self.opening.choices[generation.index]
        if index not in self._live or not self._live[index].is_live:
            growing = self.reader.growing(choice.begun(), self.opening.leg.facts)
            self._live[index] = LiveText(growing, choice.message)
        generation.watched = self._live[index].is_live

    async def sample(self, leg: Leg, generation: ResumableGeneration, seam: Seam, body: bytes) -> None:
        """One more part, as a stream where that can be read, else as a whole."""
        assert isinstance(generation, ChatGeneration)
        if not generation.live:
            await super().sample(leg, generation, seam, body)
            return
        following = FollowingChat(self.context, leg, generation, self)
        try:
            await leg.ask(following, self.scope, self.receive, body)
        except UpstreamBroken:
            part = await following.lost_part(self.turn) if self.context.resume_lost else None
            if part is not None:
                self._by_engine = False
                generation.add(part)
            raise
        meta = generation.add(following.part())
        known = await self._said_by_engine(leg.exchange.flight.worker_url, following.choices.values())
        self._by_engine = self._by_engine and known
        with Watch(self.receive, 0):
            joined, stopped = await seam.mend(finished=True)
        generation.verify(joined)
        if stopped:
            raise CannotResume("a stop string stands across the cut")
        await self.note_end(leg, generation, meta["finish_reason"])
        if generation.done:
            self.answers[generation.index] = joined
        else:
            self._watch(generation)

    async def more(self, generation: ChatGeneration, text: str, entries: Sequence[Any]) -> None:
        """Show what has come, as far as it is certain."""
        index, before = generation.index, generation.answer
        choice = self.opening.choices[index]
        deltas = self._live[index].certain((before["text"] if before is not None else "") + text)
        said = [*(entries_of(before) if before is not None else ()), *entries]
        await self.opening.give(self._shown(index, deltas, said))
        generation.shown_ids = len(choice.entries)

    def _shown(self, index: int, deltas: Sequence[Mapping[str, Any]], entries: Sequence[Any]) -> bytes:
        """Show deltas of a choice, and the logprobs that it has now and had not before."""
        choice = self.opening.choices[index]
        new = entries[len(choice.entries) :]
        choice.entries += new
        shown = deltas or ([{"reasoning_content": None}] if new else [])
        logprobs = [{"content": new} if new else None, *[None] * len(shown)]
        return b"".join(self._chunk(index, delta, logprobs=told) for delta, told in zip(shown, logprobs, strict=False))

    # The end

    async def _rest(self, index: int, answer: Mapping[str, Any] | None) -> bytes:
        """The chunks that are left of a choice."""
        choice, nothing = self.opening.choices[index], {"reasoning_content": None}
        if answer is None:
            return self._chunk(index, nothing, finish_reason="abort", matched_stop=None)
        runs = version_runs(answer["meta_info"], len(answer["output_ids"]))
        self.turn.versions[index] = KnownVersions(runs, self._by_engine)
        deltas: list[Mapping[str, Any]] = []
        try:
            facts = self.opening.leg.facts
            read = await self.reader.read(answer, choice.begun(), facts, self.questions(), stream=True)
            finish, deltas = finished(answer, read.message), LiveText(None, choice.message).behind(*read)
        except (CannotResume, UnreadableAnswer, RouterError) as error:
            self.give_up(error)
            finish = {"type": "abort"}
        shown = self._shown(index, deltas, entries_of(answer))
        end = {"finish_reason": finish["type"], "matched_stop": finish.get("matched")}
        return shown + self._chunk(index, nothing, **end)

    def _end(self, answers: Mapping[int, Any]) -> bytes:
        """What the stream says of all choices at its end."""
        opening, chunks = self.opening, b""
        extension = {**opening.extension}
        if extension.get("output_ids"):
            extension["output_ids"] = [
                answers[index]["output_ids"] if index in answers else ids
                for index, ids in enumerate(extension["output_ids"])
            ]
        for name in ROWS:
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


class _OneStart:
    """Gives a client the head of the first reply alone."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._started = False

    async def send(self, message: Message) -> None:
        """One message of a reply."""
        if message["type"] == "http.response.start":
            if self._started:
                return
            self._started = True
        await self._send(message)
