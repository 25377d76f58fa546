"""A request whose answer comes in one piece."""

from __future__ import annotations

from typing import Any

import orjson

from miles_router.asgi.exchange import Message
from miles_router.asgi.watch import Watch
from miles_router.errors import UpstreamBroken
from miles_router.partial_rollouts import glance
from miles_router.partial_rollouts.continuation import check_prompt
from miles_router.partial_rollouts.engine import OK, CannotResume, Engine
from miles_router.partial_rollouts.parts import Part, understood
from miles_router.partial_rollouts.run import Go, Run
from miles_router.partial_rollouts.seam import mend

#: Bytes of a reply within which the end of its generations is looked for while it comes.
BEGINNING = 2 * 1024 * 1024


class Whole(Run):
    """A request whose answer comes in one piece."""

    async def run(self, body: bytes) -> None:
        with self.in_flight(self.exchange, body):
            reply = await self._opened(body)
            if reply.passed_on:
                return
            cut = await self._cut(reply)
        if cut:
            await self.carry_on(cut)
            merged = [part.so_far() for part in self.parts]
            reply.data = orjson.dumps(merged if self.parts[0].streamed_index else merged[0])
        headers = [pair for pair in reply.start["headers"] if pair[0] != b"content-length"]
        headers.append((b"content-length", str(len(reply.data)).encode("ascii")))
        await self.send({**reply.start, "headers": headers})
        await self.send({"type": "http.response.body", "body": reply.data})

    async def _opened(self, body: bytes) -> _Opening:
        """The first answer; under `resume_lost` one that was cut by the loss of its worker is asked for again."""
        lost = 0
        while True:
            reply = _Opening(self, self.exchange)
            try:
                await reply.ask(body)
            except UpstreamBroken:
                if reply.passed_on:
                    raise
                lost += 1
                if not self.shared.resume_lost or lost > self.shared.router.config.max_retries:
                    raise
            else:
                return reply

    async def _cut(self, reply: _Reply) -> list[Part]:
        """The generations that a pause has cut."""
        if reply.start["status"] != OK or not glance.may_be_aborted(reply.data, len(self.parts)):
            return []
        answers = reply.answers()
        if len(answers) != len(self.parts):
            return []
        for part, answer in zip(self.parts, answers, strict=True):
            part.take(answer)
            await reply.note_end(part)
        return [part for part in self.parts if not part.done]

    async def go(self, part: Part, engine: Engine, body: bytes) -> None:
        """One more piece."""
        reply = _Reply(self, engine.exchange)
        await reply.ask(body)
        answers = reply.answers()
        if reply.start["status"] != OK or len(answers) != 1:
            raise CannotResume(f"the worker answered {reply.start['status']}")
        check_prompt(part, answers[0])
        part.take(answers[0])
        try:
            with Watch(self.receive, 0):
                joined, stopped = await mend(part, engine, finished=True)
        except CannotResume:
            part.current = None
            raise
        if stopped:
            part.answer, part.current, part.done = joined, None, True
        else:
            await reply.note_end(part)

    async def end(self, part: Part, answer: dict[str, Any]) -> None:
        """It is part of the whole."""
        part.answer, part.current = answer, None


class _Reply(Go):
    """Keeps a reply."""

    start: Message
    data = b""
    _chunks: list[bytes]

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.start, self._chunks = message, []
        else:
            self._chunks.append(message.get("body", b""))
            if not message.get("more_body", False):
                self.data = b"".join(self._chunks)

    def answers(self) -> list[dict[str, Any]]:
        """The answers in it; none if it holds something else."""
        try:
            parsed = orjson.loads(self.data)
        except orjson.JSONDecodeError:
            return []
        answers = [understood(each) for each in (parsed if isinstance(parsed, list) else [parsed])]
        return [] if None in answers else [each for each in answers if each is not None]


class _Opening(_Reply):
    """The first reply. As soon as it is clear that no generation in it was cut, it goes on as it comes: behind its
    finish reasons may stand the expert ids of a long rollout, which nobody has to hold here."""

    passed_on = False
    _size = 0

    async def send(self, message: Message) -> None:
        if self.passed_on:
            await self.run.send(message)
            return
        await super().send(message)
        self._size += len(message.get("body", b""))
        if message.get("more_body", False) and self._size <= BEGINNING and not self.run.shared.resume_lost:
            beginning = b"".join(self._chunks)
            if glance.none_aborted(beginning, len(self.run.parts)):
                self.passed_on = True
                await self.run.send(self.start)
                await self.run.send({"type": "http.response.body", "body": beginning, "more_body": True})
