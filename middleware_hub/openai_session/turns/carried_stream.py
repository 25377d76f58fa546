"""Resumption of a streamed turn: the agent reads each cut choice further while it is sampled."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from middleware_hub.openai_session.turns.carried import CarriedTurn, NameTokens
from middleware_hub.openai_session.turns.reply import ReplySender
from middleware_hub.openai_session.turns.stream import TurnStream
from miles_router.engines.answers import ABORT, MALFORMED, UnreadableAnswer, is_abort, token_count
from miles_router.engines.events import Event
from miles_router.engines.facts import Facts
from miles_router.engines.openai.chat_parts import entries_of, finish_reason_of, joined_usage
from miles_router.engines.openai.chat_stream import ROW_NAMES, GrowingChat, GrowingChatChoice, GrowingMessage
from miles_router.engines.openai.held_deltas import TOKEN_ID, may_end, token_bytes
from miles_router.engines.openai.text_reader import LiveText
from miles_router.errors import RouterError, UpstreamBroken
from miles_router.middlewares import Watch
from miles_router.middlewares.generation import (
    Attempt,
    CannotResume,
    ChatGeneration,
    FollowingStream,
    ResumableGeneration,
    Seam,
)

NO_TEXT: Mapping[str, Any] = {"reasoning_content": None}
#: Sends an attempt's output so far to the agent: its text, and its logprob entries.
ShowMore = Callable[[str, Sequence[Any]], Awaitable[None]]


class RestStream(FollowingStream):
    """The stream of an attempt that resumes one choice, with unparsed text."""

    layer = "openai_sessions"

    def __init__(
        self, attempt: Attempt, generation: ChatGeneration, version: Callable[[], str | None], show: ShowMore
    ) -> None:
        super().__init__(attempt)
        self.growing = GrowingChat(may_be_cut=True)
        self._generation = generation
        self._version = version
        self._show = show
        self._text: list[str] = []
        self._end: dict[str, Any] | None = None

    @property
    def choice(self) -> GrowingChatChoice | None:
        """The choice; None before its first chunk."""
        return self.growing.growing.get(0)

    async def event(self, event: Event) -> bytes:
        """Add an event to the choice and show the new text; return b"" because nothing is relayed as it came.

        Raises:
            CannotResume: the event is not a chunk.
        """
        if event.data and not event.is_last:
            self.keep(0, len(event.raw), more=True)
            try:
                await self._read(event.parse())
            except (UnreadableAnswer, *MALFORMED) as error:
                raise CannotResume("the worker's stream has an event that is not a chunk") from error
        return b""

    async def _read(self, chunk: Any) -> None:
        choices = [{**choice, "index": 0} for choice in chunk["choices"]]
        self.growing.add({**chunk, "choices": choices}, self._version)
        for choice in choices:
            new = (choice.get("delta") or {}).get("content") or ""
            self._text.append(new)
            if (finish := choice.get("finish_reason")) is not None:
                self._end = {"type": finish, "matched": choice.get("matched_stop")}
                await self.attempt.learn_engine()
                continue
            certain = self._text[:-1] if may_end(new, self._generation.stops) else self._text
            assert self.choice is not None
            await self._show("".join(certain), self.choice.entries)

    def part(self) -> dict[str, Any]:
        """Return the attempt's output in the form of `/generate`.

        Raises:
            CannotResume: the stream had no finish reason.
            UnreadableAnswer: the stream did not contain its token ids.
        """
        if self._end is None or self.choice is None:
            raise CannotResume("the worker's stream ended without a finish reason")
        end = self._end
        if end["type"] == "length":
            end = {"type": "length", "length": len(self.choice.entries)}
        elif is_abort(end["type"]):
            end = {"type": end["type"]}
        return {**self.growing.as_generate(0, self._generation.given, end), "text": "".join(self._text)}

    async def lost_part(self, names: NameTokens) -> dict[str, Any] | None:
        """Return the output of an attempt whose worker was lost, in the form of `/generate`; None if there is none.

        Raises:
            CannotResume: the token ids are ambiguous.
        """
        if self.choice is None:
            return None
        self.growing.set_ids({0: await token_ids_of(self.choice, names)})
        return {**self.growing.as_generate(0, self._generation.given, None), "text": "".join(self._text)}


class CarriedStream(CarriedTurn):
    """A cut turn whose answer is streamed.

    The agent keeps what it has seen: a choice that cannot be resumed ends with the finish reason `abort`.
    """

    def start_from(self, stream: TurnStream, attempt: Attempt, reply: ReplySender, names: NameTokens) -> None:
        """Set the stream of the first attempt, from which the turn will resume."""
        self._stream = stream
        assert isinstance(stream.growing, GrowingChat)
        self._growing = stream.growing
        self._attempt = attempt
        self._reply = reply
        self._names = names
        self._live: dict[int, LiveText] = {}
        self._shown_entries: dict[int, int] = {}  # by choice: the number of tokens whose logprobs the agent has
        self._confirmed = False

    async def recover_lost(self) -> None:
        """Recover token ids and prompt ids that a lost worker did not send.

        Raises:
            UpstreamBroken: the ids cannot be recovered.
        """
        growing, router = self._growing, self.services.router
        try:
            if not self._stream.mark_lost():
                raise CannotResume("its stream so far cannot be read")
            growing.set_ids(
                {index: await token_ids_of(choice, self._names) for index, choice in sorted(growing.growing.items())}
            )
            if not (self.fields.get("input_ids") or growing.prompt):
                growing.prompt = await self.questions().render(self.fields)
                growing.extension["input_ids"] = growing.prompt
        except (CannotResume, RouterError, *MALFORMED) as error:
            self.give_up(error)
            raise UpstreamBroken(f"the worker was lost: {error}") from error
        if self._attempt.facts.model_path is None:
            self._attempt.facts = next(iter(await router.fleet.all_facts()), Facts())

    async def run(self) -> None:
        """Resume the cut choices, and show the agent how they end."""
        cut, grown = self._stream.cut_choices, self._growing.growing
        answers: dict[int, Any] = {}
        began = [grown[index] for index in cut if index in grown]
        self._confirmed = await self._engine_confirms(self.exchange.routing.worker_url, began)
        try:
            answers = await self.resume([await self._begun(index) for index in sorted(cut)])
        except (CannotResume, UnreadableAnswer) as error:
            self.give_up(error)
        for index in sorted(cut):
            await self._reply.send_part(await self._final_chunks(index, answers.get(index)))
        self._show_totals(answers)
        for index, answer in answers.items():
            self._growing.replace_tokens(index, answer)
        self._stream.end_resumed()

    async def _engine_confirms(self, url: str | None, choices: Iterable[GrowingChatChoice]) -> bool:
        """Return True if the engine confirms the weight version that the router noted while it streamed."""
        versions = {run.version for choice in choices for run in choice.versions.runs}
        if url is None or len(versions) != 1:
            return False
        return await self.services.router.fleet.weight_version(url) in versions

    async def _begun(self, index: int) -> ChatGeneration:
        finish = self._stream.cut_choices[index]
        end = None if finish is None else {"type": finish}
        prompt = self.prompt(self._growing.prompt)
        self._shown_entries[index] = len(self._growing.growing[index].entries)
        generation = self.begin(index, prompt, self._attempt, self._growing.as_generate(index, len(prompt), end), end)
        self._watch(generation)
        return generation

    # Resumed attempts

    def _watch(self, generation: ChatGeneration) -> None:
        """Find out whether the rest of the choice can be parsed while it streams.

        Raises:
            CannotResume: the agent has seen a tool call without a function name.
        """
        index = generation.index
        if index not in self._live or not self._live[index].is_live:
            try:
                shown, begun = self._stream.shown_message(index), self._stream.message_start(index)
            except MALFORMED as error:
                raise CannotResume("the agent was sent a tool call without a function name") from error
            growing = self.reader.growing(begun, self._attempt.facts)
            self._live[index] = LiveText(growing, GrowingMessage.from_message(shown))
        generation.watched = self._live[index].is_live

    async def sample(self, attempt: Attempt, generation: ResumableGeneration, seam: Seam, body: bytes) -> None:
        """Resume a choice on a worker: as a stream if it can be parsed while it streams, else as a whole answer."""
        assert isinstance(generation, ChatGeneration)
        if not generation.live:
            await super().sample(attempt, generation, seam, body)
            return
        self._rows[generation.index].renew()
        pool, routing = self.services.router.pool, attempt.exchange.routing

        async def show(text: str, entries: Sequence[Any]) -> None:
            await self._show_new(generation, text, entries)

        following = RestStream(attempt, generation, lambda: pool.version_of(routing.worker_url), show)
        try:
            await attempt.ask(following, self.scope, self.receive, body)
        except UpstreamBroken:
            part = await following.lost_part(self._names) if self.services.resume_lost else None
            if part is not None:
                self._confirmed = False
                generation.add(part)
            raise
        meta = generation.add(following.part())
        self.on_answer(generation)
        known = await self._engine_confirms(routing.worker_url, following.growing.growing.values())
        self._confirmed = self._confirmed and known
        with Watch(self.receive, 0):
            joined, stopped = await seam.mend(finished=True)
        generation.verify(joined)
        if stopped:
            raise CannotResume("a stop string spans the cut")
        await self.note_end(attempt, generation, meta["finish_reason"])
        if generation.has_ended:
            self.answers[generation.index] = joined
        else:
            self._watch(generation)

    async def _show_new(self, generation: ChatGeneration, text: str, entries: Sequence[Any]) -> None:
        """Show the part of the new text whose parse cannot change any more."""
        index, before = generation.index, generation.answer
        deltas = self._live[index].new_deltas((before["text"] if before is not None else "") + text)
        all_entries = [*(entries_of(before) if before is not None else ()), *entries]
        await self._reply.send_part(self._show(index, deltas, all_entries))
        generation.shown_ids = self._growing.growing[index].tokens = self._shown_entries[index]

    def _show(self, index: int, deltas: Sequence[Mapping[str, Any]], entries: Sequence[Any]) -> bytes:
        """Return the chunks for deltas of a choice, with the logprob entries that the agent does not have yet."""
        new = entries[self._shown_entries[index] :]
        self._shown_entries[index] += len(new)
        shown = deltas or ([NO_TEXT] if new else [])
        logprobs = [{"content": new} if new else None, *[None] * len(shown)]
        pairs = zip(shown, logprobs, strict=False)
        return b"".join(self._stream.show(index, delta, logprobs=own) for delta, own in pairs)

    # The end

    async def _final_chunks(self, index: int, answer: Mapping[str, Any] | None) -> bytes:
        """Return the last chunks of a choice, up to its finish reason; `abort` if there is no complete answer."""
        if answer is None:
            return self._stream.show(index, NO_TEXT, finish_reason=ABORT)
        self._stream.resumed_confirmed[index] = self._confirmed
        deltas: list[Mapping[str, Any]] = []
        try:
            begun, facts = self._stream.message_start(index), self._attempt.facts
            read = await self.reader.read(answer, begun, facts, self.questions(), stream=True)
            finish, deltas = finish_reason_of(answer, read.message), self._live[index].remaining_deltas(*read)
        except (CannotResume, UnreadableAnswer, RouterError, *MALFORMED) as error:
            self.give_up(error)
            finish = {"type": ABORT}
        shown = self._show(index, deltas, entries_of(answer))
        end = {"finish_reason": finish["type"], "matched_stop": finish.get("matched")}
        return shown + self._stream.show(index, NO_TEXT, **end)

    def _show_totals(self, answers: Mapping[int, Any]) -> None:
        """Write the chunks at the stream's end that belong to all choices: ids, rows and usage."""
        growing, stream = self._growing, self._stream
        extension = {**growing.extension}
        if extension.get("output_ids"):
            extension["output_ids"] = [
                answers[index]["output_ids"] if index in answers else ids
                for index, ids in enumerate(extension["output_ids"])
            ]
        for name in ROW_NAMES:
            rows = [each["meta_info"][name] for each in answers.values() if each["meta_info"].get(name)]
            extension |= {name: rows[0]} if rows else {}
        if extension:
            stream.show_totals(sglext=extension)
        if growing.usage is not None:
            metas = [self._meta(index, answers) for index in sorted(growing.growing)]
            usage = joined_usage(growing.usage, metas)
            growing.prompt_tokens = token_count(usage)
            stream.show_totals(usage=usage)

    def _meta(self, index: int, answers: Mapping[int, Any]) -> Mapping[str, Any]:
        if index in answers:
            meta: Mapping[str, Any] = answers[index]["meta_info"]
            return meta
        return {"completion_tokens": len(self._growing.growing[index].entries)}


async def token_ids_of(choice: GrowingChatChoice, names: NameTokens) -> list[int]:
    """Return the token ids of a choice in a stream: from its logprob entries, or else from the bytes of its tokens.

    Raises:
        CannotResume: the bytes are missing or ambiguous.
    """
    ids_in_entries = [entry[TOKEN_ID] for entry in choice.entries if type(entry.get(TOKEN_ID)) is int]
    if ids_in_entries and len(ids_in_entries) == len(choice.entries):
        return ids_in_entries
    try:
        ids = await names([token_bytes(entry) for entry in choice.entries])
    except MALFORMED as error:
        raise CannotResume("the cut stream does not give the bytes of a token") from error
    if ids is None:
        raise CannotResume("the ids of the cut stream are not certain: the bytes of its tokens are ambiguous")
    return ids
