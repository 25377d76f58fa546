"""Heartbeats of a waiting stream: `response.created` once, then `response.in_progress`.

Codex's timeout counts events, not comments, and its client accepts an answer only after `response.created`. So the
heartbeat sends that event itself, for the response that the turn will have. The answer's own `response.created` is then
dropped, and later events are renumbered. The recorded reply keeps its own numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from middleware_hub.openai_session.agent_apis.agent_api import StreamForm
from middleware_hub.openai_session.agent_apis.responses.envelope import Envelope
from middleware_hub.openai_session.agent_apis.responses.stream import ResponsesWriter
from middleware_hub.openai_session.sessions.session import AgentRequest
from miles_router.middlewares import write_event

#: The number of an event. `Emitter.emit` writes it as the last field but one, in front of the type.
NUMBER = re.compile(rb'"sequence_number":(\d+)(?=,"type":"[a-z_.]+"\}\n\n)')
CREATED, IN_PROGRESS = "response.created", "response.in_progress"
BEGINNING = re.compile(rb"event: response\.(?:created|in_progress)\n[^\n]*\n\n")


class ResponsesForm(StreamForm):
    """The heartbeats of one stream.

    Args:
        without_turn: returns the response for a request that fails before it becomes a turn.
    """

    def __init__(self, without_turn: Callable[[], Envelope | None]) -> None:
        self._without_turn = without_turn
        self._envelope: Envelope | None = None
        self._number = 0  # of the next event
        self._shifted = False  # whether the answer's events must be renumbered

    def set_turn(self, turn: AgentRequest) -> None:
        assert isinstance(turn.asked, Envelope)
        self._envelope = turn.asked

    def beat(self) -> bytes:
        """Return the events of one heartbeat, or a comment while the response is unknown."""
        if self._envelope is None:
            return super().beat()
        self._shifted = True
        self.began = self.began or not self._number
        kinds = (IN_PROGRESS,) if self._number else (CREATED, IN_PROGRESS)
        response = self._envelope.body([])
        return b"".join(self._event(kind, {"response": response}) for kind in kinds)

    def passing(self, data: bytes) -> bytes:
        """Return a part of the answer, with its events renumbered for this stream."""
        if self.began:
            data = BEGINNING.sub(b"", data)
        if self._shifted:
            return NUMBER.sub(self._renumbered, data)
        numbers = NUMBER.findall(data)
        self._number = int(numbers[-1]) + 1 if numbers else self._number
        return data

    def failed(self, body: Mapping[str, Any]) -> bytes:
        """Return `response.failed`, after `response.created` if that was not sent yet."""
        error = body["error"]
        envelope = self._envelope or self._without_turn()
        if envelope is None:
            return self._event("error", {name: error.get(name) for name in ("code", "message", "param")})
        events = ResponsesWriter(envelope, streams=True).failed(error)
        if self._number:
            events = BEGINNING.sub(b"", events)
        return NUMBER.sub(self._renumbered, events)

    def _event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        self._number += 1
        return write_event({**fields, "sequence_number": self._number - 1, "type": kind}, kind.encode("ascii"))

    def _renumbered(self, found: re.Match[bytes]) -> bytes:
        self._number += 1
        return b'"sequence_number":%d' % (self._number - 1)
