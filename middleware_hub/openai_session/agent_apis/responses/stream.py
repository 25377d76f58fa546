"""Writes the events of a streamed answer: `response.created`, items that are added, grow and are done,
`response.completed`.

Each engine chunk becomes events at once. Parts that make a call look complete wait until later output proves that the
call was sampled to its end: the closing brace of its arguments, and its `done` events. An engine that is cut inside a
call closes its arguments by itself; the router leaves such a call open.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from middleware_hub.openai_session.agent_apis.agent_api import ReplyWriter
from middleware_hub.openai_session.agent_apis.responses import errors
from middleware_hub.openai_session.agent_apis.responses.envelope import CUT, STATUS, Envelope
from middleware_hub.openai_session.agent_apis.responses.open_items import Emitter, OpenCall, OpenText
from middleware_hub.openai_session.episodes.contract import SessionStatus
from middleware_hub.openai_session.errors import AnswerCut, ContextOverflow
from miles_router.engines.known import overflow_of
from miles_router.engines.openai.chat_stream import cached_tokens
from miles_router.engines.refusals import parsed_refusal
from miles_router.middlewares import Event

#: The bytes that end a stream. `Emitter.emit` writes an event's type last.
LAST = tuple(b'"type":"response.%b"}\n\n' % status for status in (b"completed", b"incomplete", b"failed"))


class ResponsesWriter(ReplyWriter):
    """A writer of one answer."""

    def __init__(self, envelope: Envelope, *, streams: bool = False) -> None:
        self._envelope = envelope
        self._streams = streams
        self._writer = envelope.writer()
        self._emitter = Emitter()
        self._open: OpenText | OpenCall | None = None
        self._output: list[dict[str, Any]] = []
        self._item_count = 0
        self._blank: list[str] = []  # white space that is held back
        self._finish: str | None = None
        self._cached: int | None = None
        self._started = self._over = False

    def write_answer(self, answer: dict[str, Any]) -> object:
        """Return the response object.

        Raises:
            AnswerCut: the engine cut the answer off.
        """
        self._read(answer)
        (choice,) = answer["choices"]
        if choice["finish_reason"] not in STATUS:
            raise AnswerCut("the engine cut the answer off")
        return self._envelope.finished_with(choice["message"], choice["finish_reason"])

    def write_refusal(self, body: bytes, status: int) -> bytes:
        """Return the body for an engine's error response.

        Raises:
            ContextOverflow: the context window is full and the request asked for a stream, which reports that as an
                event.
        """
        overflow = overflow_of(parsed_refusal(body)) if self._streams else None
        if overflow is not None:
            raise ContextOverflow(SessionStatus.CONTEXT.reason, overflow=overflow)
        return errors.refusal_body(body, status)

    def failed(self, error: Mapping[str, Any]) -> bytes:
        """Return the events of a response that failed before it had any output."""
        self._fail(error)
        return self._emitter.take_events()

    def write_chunk(self, chunk: dict[str, Any], name: bytes) -> bytes:
        self._start()
        self._read(chunk)
        for choice in chunk["choices"]:
            self._delta(choice.get("delta") or {})
            if choice.get("finish_reason") is not None:
                self._finish = choice["finish_reason"]
                self._end_item(last=True)
        return self._emitter.take_events()

    def write_other(self, event: Event) -> bytes:
        """Return the events for the end of the stream or an error; comments pass unchanged."""
        if not event.data:
            return event.raw  # a keep-alive comment
        if event.is_last:
            self._end()
        elif isinstance(parsed := event.parse(), Mapping) and "error" in parsed:
            self._fail(errors.engine_error(parsed, 500))
        return self._emitter.take_events()

    # The response

    def _start(self) -> None:
        if not self._started:
            self._started = True
            body = self._envelope.body([])
            self._emitter.emit("response.created", response=body)
            self._emitter.emit("response.in_progress", response=body)

    def _end(self) -> None:
        if self._over:
            return
        self._start()
        status = STATUS.get(self._finish or "", ("failed", None))[0]
        if not (self._item_count or status == "failed"):  # an empty answer needs an item that the agent can send back
            self._open_text(thinks=False)
            self._end_item(last=True)  # white space, or nothing
        self._over = True
        body = self._envelope.body(self._output, self._finish or "abort")
        self._emitter.emit(f"response.{status}", response=body)

    def _fail(self, error: Mapping[str, Any]) -> None:
        """Write `response.failed`, unless the stream has ended. Later events are dropped."""
        if not self._over:
            self._start()
            self._over = True
            body = self._envelope.body(self._output, "abort")
            detail = {"code": error["code"] or CUT["code"], "message": error["message"]}
            self._emitter.emit("response.failed", response={**body, "error": detail})

    def _read(self, part: Mapping[str, Any]) -> None:
        """Read the usage of an answer, or of a chunk of one."""
        usage, cached = part.get("usage"), cached_tokens(part.get("sglext"))
        if cached is not None:
            self._cached = cached
        elif self._envelope.turn is not None:
            self._cached = self._envelope.turn.facts.get("cached_tokens")
        if isinstance(usage, Mapping):
            self._envelope.usage = usage_of(usage)
        if self._envelope.usage is not None and self._cached is not None:
            most = self._envelope.usage["input_tokens"]
            details = {"cached_tokens": min(self._cached, most), "cache_write_tokens": 0}
            self._envelope.usage = {**self._envelope.usage, "input_tokens_details": details}

    # Its items

    def _delta(self, delta: Mapping[str, Any]) -> None:
        if delta.get("reasoning_content"):
            self._open_text(thinks=True).grow(delta["reasoning_content"])
        if delta.get("content"):
            self._write_text(delta["content"])
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            if function.get("name"):
                kind = self._envelope.settings.tools.of(function["name"]).form.kind
                self._end_item()
                self._blank = []
                self._open = OpenCall(self._emitter, self._writer, self._next_index(), call, kind)
            if function.get("arguments") and isinstance(self._open, OpenCall) and self._open.index == call.get("index"):
                self._open.grow(function["arguments"])

    def _write_text(self, text: str) -> None:
        """Write text. Trailing white space waits for more text; parsers leave it before a call, where it is not
        shown."""
        shown = text.rstrip()
        if shown:
            self._open_text(thinks=False).grow("".join(self._blank) + shown)
            self._blank = []
        self._blank.append(text[len(shown) :])

    def _open_text(self, *, thinks: bool) -> OpenText:
        if not (isinstance(self._open, OpenText) and self._open.thinks is thinks):
            self._end_item()
            self._open = OpenText(self._emitter, self._writer, self._next_index(), thinks=thinks)
        return self._open

    def _next_index(self) -> int:
        self._item_count += 1
        return self._item_count - 1

    def _end_item(self, *, last: bool = False) -> None:
        """Close the open item. With `last`, the item gets the status of the answer."""
        blank = "".join(self._blank)
        if last and blank and isinstance(self._open, OpenText) and not self._open.thinks:
            self._open.grow(blank)
        if self._open is None:
            return
        complete = not last or STATUS.get(self._finish or "", ("", None))[0] == "completed"
        self._envelope.cut_call = isinstance(self._open, OpenCall) and not complete
        item = self._open.close("completed" if complete else "incomplete")
        self._output += [item] if item is not None else []
        self._open = None


def usage_of(usage: Mapping[str, Any]) -> dict[str, Any]:
    given, sampled = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    cached, thought = usage.get("prompt_tokens_details") or {}, usage.get("completion_tokens_details") or {}
    reasoning = usage.get("reasoning_tokens") or thought.get("reasoning_tokens") or 0
    return {
        "input_tokens": given,
        "input_tokens_details": {"cached_tokens": cached.get("cached_tokens") or 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": given + sampled,
    }
