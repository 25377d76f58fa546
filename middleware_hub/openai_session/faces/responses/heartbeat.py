"""A waiting stream of this API: `response.created`, and `response.in_progress` as often as it takes.

Codex counts events and no comments, and its client takes an answer only behind `response.created`. So the heartbeat
writes that event itself, for the response that the turn will have; the answer's own is left out when it comes, and the
events behind it get other numbers. A recorded answer has the numbers that it had.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from middleware_hub.openai_session.faces.face import StreamForm
from middleware_hub.openai_session.faces.responses.envelope import Envelope
from middleware_hub.openai_session.faces.responses.stream import ResponsesWriter
from middleware_hub.openai_session.sessions.agent_request import AgentRequest
from miles_router.middlewares import write_event

#: The number of an event: see `Emitter.emit`, which writes it behind everything but the type.
NUMBER = re.compile(rb'"sequence_number":(\d+)(?=,"type":"[a-z_.]+"\}\n\n)')
CREATED, IN_PROGRESS = "response.created", "response.in_progress"
BEGINNING = re.compile(rb"event: response\.(?:created|in_progress)\n[^\n]*\n\n")


class ResponsesForm(StreamForm):
    """The heartbeats of one stream.

    Args:
        without_turn: gives the response to a request that fails before it becomes a turn.
    """

    def __init__(self, without_turn: Callable[[], Envelope | None]) -> None:
        self._without_turn = without_turn
        self._envelope: Envelope | None = None
        self._number = 0  # of the next event
        self._shifted = False  # whether the answer's events have other numbers now

    def is_of(self, turn: AgentRequest) -> None:
        """Take note of the response."""
        assert isinstance(turn.asked, Envelope)
        self._envelope = turn.asked

    def beat(self) -> bytes:
        """Return the events of a heartbeat; a comment as long as the response is not known."""
        if self._envelope is None:
            return super().beat()
        self._shifted = True
        self.began = self.began or not self._number
        kinds = (IN_PROGRESS,) if self._number else (CREATED, IN_PROGRESS)
        response = self._envelope.body([])
        return b"".join(self._event(kind, {"response": response}) for kind in kinds)

    def passing(self, data: bytes) -> bytes:
        """Return a part of the answer with the numbers that its events have in this stream."""
        if self.began:
            data = BEGINNING.sub(b"", data)
        if self._shifted:
            return NUMBER.sub(self._renumbered, data)
        numbers = NUMBER.findall(data)
        self._number = int(numbers[-1]) + 1 if numbers else self._number
        return data

    def failed(self, body: Mapping[str, Any]) -> bytes:
        """Return `response.failed`, and the response's beginning where that was not sent."""
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
