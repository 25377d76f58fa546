"""The Responses API without a socket: what its api makes of a request, and what it writes for an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from middleware_hub.openai_session.agent_apis.responses.envelope import Envelope, Responses, new_id
from middleware_hub.openai_session.agent_apis.responses.request import ResponsesRequest, read
from middleware_hub.openai_session.agent_apis.responses.stream import ResponsesWriter
from middleware_hub.openai_session.sessions.turn import Turn
from miles_router.engines.events import LAST_EVENT
from miles_router.engines.openai.chat_stream import GrowingMessage
from miles_router.middlewares import Event
from tests.support.sessions import Scene


def asked(scene: Scene, given: Any = "Hi", *, system_anywhere: bool = True, **fields: Any) -> ResponsesRequest:
    request = {"model": "m", "input": given, **fields}
    return read(request, Responses.of(scene.session), system_anywhere=system_anywhere)


def messages(scene: Scene, given: Any, **fields: Any) -> list[Any]:
    return list(asked(scene, given, **fields).fields["messages"])


class Written:
    """One answer in this API: as a stream's events where it comes in chunks, else whole."""

    def __init__(self, scene: Scene, said: Mapping[str, Any], finish: str = "stop", **fields: Any) -> None:
        self.asked = asked(scene, **fields)
        own = self.asked
        self.envelope = Envelope(new_id(), 1, own.settings, own.own, own.seals)
        plan = scene.ask(own.fields["messages"])

        def remember(turn: Turn) -> int:
            return Responses.of(scene.session).keep(self.envelope, turn, stored=own.stored)

        self._plan = replace(plan, request=replace(plan.request, remember=remember))
        self._scene, self._said, self._finish = scene, said, finish

    def _record(self, said: Mapping[str, Any]) -> None:
        self._scene.time += 1
        self._scene.record(self._plan, self._scene.generated(self._plan, dict(said), finish=self._finish))

    def whole(self) -> dict[str, Any]:
        self._record(self._said)
        choice = {"index": 0, "message": self._said, "finish_reason": self._finish}
        answer = {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}
        return dict(orjson.loads(orjson.dumps(ResponsesWriter(self.envelope).write_answer(answer))))

    def events(self, deltas: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        writer, growing, written = ResponsesWriter(self.envelope), GrowingMessage(), b""
        for delta in [{"role": "assistant", "content": ""}, *deltas]:
            growing.add(delta)
            choice = {"index": 0, "delta": delta, "finish_reason": None}
            written += writer.write_chunk({"choices": [choice]}, b"")
        end = {"index": 0, "delta": {}, "finish_reason": self._finish}
        written += writer.write_chunk({"choices": [end]}, b"")
        written += writer.write_chunk({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}, b"")
        written += writer.write_other(Event.read(LAST_EVENT))
        self._record(growing.message())
        return [Event.read(raw + b"\n\n").parse() for raw in written.split(b"\n\n") if raw]
