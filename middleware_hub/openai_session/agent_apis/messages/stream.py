"""Writes the events of a streamed answer: `message_start`, blocks that start, grow and stop, `message_delta`,
`message_stop`.

Each engine chunk becomes events at once, with two exceptions. Leading white space waits for the text behind it, since
it is no block by itself. A call's arguments wait until they are complete: arguments that are not a JSON object must be
wrapped in one. Meanwhile empty deltas show progress. An engine that is cut inside a call closes its arguments by
itself; the router leaves them open.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from middleware_hub.openai_session.agent_apis.agent_api import ReplyWriter, StreamForm
from middleware_hub.openai_session.agent_apis.messages import errors
from middleware_hub.openai_session.agent_apis.messages.answer import CUT, AnswerEnd, complete_message, message
from middleware_hub.openai_session.agent_apis.messages.echo import shown_input, signature
from middleware_hub.openai_session.agent_apis.open_calls import open_arguments
from miles_router.middlewares import Event, write_event

PING = write_event({"type": "ping"}, b"ping")
#: The fields of a delta that carry content.
SAID = ("reasoning_content", "content", "tool_calls")
LAST = write_event({"type": "message_stop"}, b"message_stop")


class MessagesForm(StreamForm):
    """Heartbeats of this API: pings, which are allowed anywhere, also before `message_start`."""

    def beat(self) -> bytes:
        return PING

    def failed(self, body: Mapping[str, Any]) -> bytes:
        return write_event(body, b"error")


class MessagesWriter(ReplyWriter):
    """A writer of one answer."""

    def __init__(self, ending: AnswerEnd, *, omits_thinking: bool) -> None:
        self._ending = ending
        self._omits_thinking = omits_thinking
        self._events: list[bytes] = []  # not returned yet
        self._started = self._over = False
        self._open: str | None = None  # the type of the open block
        self._index = -1  # of the last block
        self._thinking: list[str] = []  # of the open block
        self._blank: list[str] = []  # white space that may begin a text
        self._call: Mapping[str, Any] = {}  # the open call
        self._call_index: object = None
        self._calls = False
        self._arguments: list[str] = []  # of the open call

    def write_answer(self, answer: dict[str, Any]) -> object:
        """Return the message.

        Raises:
            AnswerCut: the engine cut the answer off.
        """
        return complete_message(answer, self._ending, omits_thinking=self._omits_thinking)

    def write_refusal(self, body: bytes, status: int) -> bytes:
        return errors.refusal_body(body, status)

    def write_chunk(self, chunk: dict[str, Any], name: bytes) -> bytes:
        self._ending.read(chunk)
        for choice in chunk["choices"]:
            delta = choice.get("delta") or {}
            if self._ending.knows_prompt or choice.get("finish_reason") is not None or any(map(delta.get, SAID)):
                self._start(chunk)
            self._delta(delta)
            if choice.get("finish_reason") is not None:
                self._ending.read_finish(choice)
                self._close(whole_call=self._ending.last_call_complete)
        return self._take_events()

    def write_other(self, event: Event) -> bytes:
        """Return the events for the end of the stream or an error; comments pass unchanged."""
        if not event.data:
            return event.raw  # a keep-alive comment
        parsed = event.parse()
        if event.is_last:
            self._end()
        elif isinstance(parsed, Mapping) and "error" in parsed:
            self._fail(errors.engine_error(parsed, 500))
        return self._take_events()

    # The message

    def _start(self, chunk: Mapping[str, Any]) -> None:
        if not self._started:
            self._started = True
            self._emit("message_start", message=message(chunk, (), self._ending))
            self._events.append(PING)

    def _end(self) -> None:
        if self._over:
            return
        if self._ending.is_cut:
            self._fail(errors.error(errors.OVERLOADED, CUT))
            return
        self._over = True
        delta = self._ending.stop_fields(calls=self._calls)
        self._emit("message_delta", delta=delta, usage=self._ending.usage())
        self._events.append(LAST)

    def _fail(self, body: dict[str, Any]) -> None:
        """Write an error event, unless the stream has ended. Later events are dropped."""
        if not self._over:
            self._over = True
            self._events.append(write_event(body, b"error"))

    # Its blocks

    def _delta(self, delta: Mapping[str, Any]) -> None:
        thinking, text = delta.get("reasoning_content"), delta.get("content")
        if thinking:
            self._write_thinking(thinking)
        if text:
            self._write_text(text)
        for call in delta.get("tool_calls") or ():
            self._write_call(call)

    def _write_thinking(self, thinking: str) -> None:
        self._open_block("thinking", thinking="", signature="")
        self._thinking.append(thinking)
        if not self._omits_thinking:
            self._write_delta("thinking_delta", thinking=thinking)

    def _write_text(self, text: str) -> None:
        if self._open != "text":
            self._blank.append(text)
            if text.isspace():
                return
            text = "".join(self._blank)
        self._open_block("text", text="")
        self._write_delta("text_delta", text=text)

    def _write_call(self, call: Mapping[str, Any]) -> None:
        function = call.get("function") or {}
        if function.get("name"):
            self._close(whole_call=True)
            self._call, self._call_index = {"id": call.get("id"), "name": function["name"], "input": {}}, call["index"]
        arguments = function.get("arguments")
        if not arguments or call["index"] != self._call_index:
            return
        self._arguments.append(arguments)
        if open_arguments(arguments) or self._open == "tool_use":
            self._open_call()
            self._write_delta("input_json_delta", partial_json="")

    def _open_call(self) -> None:
        if self._open != "tool_use" and self._call:
            self._calls = True
            self._open_block("tool_use", **self._call)

    def _open_block(self, kind: str, **fields: Any) -> None:
        if self._open == kind:
            return
        if kind != "tool_use":
            self._close(whole_call=True)
        self._index += 1
        self._open = kind
        self._emit("content_block_start", index=self._index, content_block={"type": kind, **fields})

    def _close(self, *, whole_call: bool) -> None:
        """Close the open block. `whole_call`: its call was sampled to its end."""
        arguments = "".join(self._arguments)
        if whole_call and self._call:
            self._open_call()
            if arguments.strip():
                self._write_delta("input_json_delta", partial_json=shown_input(arguments))
        elif self._open == "tool_use":
            self._write_delta("input_json_delta", partial_json=open_arguments(arguments))
        if self._open == "thinking":
            self._write_delta("signature_delta", signature=signature("".join(self._thinking)))
        if self._open is not None:
            self._emit("content_block_stop", index=self._index)
        self._open, self._call, self._call_index, self._arguments = None, {}, None, []
        self._thinking, self._blank = [], []

    def _write_delta(self, kind: str, **fields: str) -> None:
        self._emit("content_block_delta", index=self._index, delta={"type": kind, **fields})

    # Events

    def _emit(self, kind: str, **fields: Any) -> None:
        self._events.append(write_event({"type": kind, **fields}, kind.encode("ascii")))

    def _take_events(self) -> bytes:
        events, self._events = self._events, []
        return b"".join(events)
