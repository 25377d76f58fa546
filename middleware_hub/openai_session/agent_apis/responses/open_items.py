"""Items of a stream, from their first event to their last."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from middleware_hub.openai_session.agent_apis.open_calls import OpenArguments, open_arguments
from middleware_hub.openai_session.agent_apis.responses.forms import CUSTOM, FUNCTION, input_of
from middleware_hub.openai_session.agent_apis.responses.items import PREFIXES, ItemWriter, output_text
from miles_router.middlewares import write_event

#: The beginning of a custom tool's arguments, and the most characters that are searched for it.
INPUT = re.compile(r'\s*\{\s*"input"\s*:\s*"')
MAX_BEGINNING = 64
#: Complete characters of a JSON string. The two escapes of a surrogate pair are one character.
WHOLE = re.compile(
    r'(?:[^"\\]+|\\[^u]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*"
)


class Emitter:
    """A writer of one stream's events, which numbers them."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._number = 0

    def emit(self, kind: str, **fields: Any) -> None:
        """Write one event."""
        content = {**fields, "sequence_number": self._number, "type": kind}
        self._number += 1
        self._events.append(write_event(content, kind.encode("ascii")))

    def take_events(self) -> bytes:
        """Return the events written since the last call."""
        events, self._events = self._events, []
        return b"".join(events)


class OpenItem(ABC):
    """An item whose content is still streaming."""

    def __init__(self, emitter: Emitter, writer: ItemWriter, place: int) -> None:
        self._emitter = emitter
        self._writer = writer
        self._place = place
        self._text: list[str] = []

    @abstractmethod
    def close(self, status: str) -> dict[str, Any] | None:
        """Write the last events; return the item for the response's output, or None if the item is left out."""

    def _emit(self, kind: str, **fields: Any) -> None:
        self._emitter.emit(f"response.{kind}", output_index=self._place, **fields)


class OpenText(OpenItem):
    """A message or reasoning item that is streaming."""

    def __init__(self, emitter: Emitter, writer: ItemWriter, place: int, *, thinks: bool) -> None:
        super().__init__(emitter, writer, place)
        self.thinks = thinks
        self._event = "reasoning_text" if thinks else "output_text"
        self._logprobs: Mapping[str, Any] = {} if thinks else {"logprobs": []}
        self._item = writer.reasoning if thinks else writer.message
        self._id = writer.id("rs" if thinks else "msg", place)
        self._emit("output_item.added", item=self._item(self._id, None, "in_progress"))
        self._emit("content_part.added", item_id=self._id, content_index=0, part=self._part(""))

    def grow(self, text: str) -> None:
        """Write more text."""
        self._text.append(text)
        self._emit(f"{self._event}.delta", item_id=self._id, content_index=0, delta=text, **self._logprobs)

    def close(self, status: str) -> dict[str, Any]:
        text = "".join(self._text)
        item = self._item(self._id, text, status)
        self._emit(f"{self._event}.done", item_id=self._id, content_index=0, text=text, **self._logprobs)
        self._emit("content_part.done", item_id=self._id, content_index=0, part=self._part(text))
        self._emit("output_item.done", item=item)
        return item

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text} if self.thinks else output_text(text)


class OpenCall(OpenItem):
    """A tool call that is streaming. Only functions and custom tools have events before the call is complete."""

    def __init__(self, emitter: Emitter, writer: ItemWriter, place: int, call: Mapping[str, Any], kind: str) -> None:
        super().__init__(emitter, writer, place)
        self.index = call.get("index")
        self._call: dict[str, Any] = {"id": call.get("id"), "function": {"name": call["function"]["name"]}}
        self._kind = kind
        self._id = writer.id(PREFIXES[kind], place)
        self._shown: list[str] = []  # deltas of the arguments or of the input
        self._arguments = OpenArguments()
        self._input = TextOfInput()
        if kind in (FUNCTION.kind, CUSTOM.kind):
            self._emit("output_item.added", item=self._item("", "in_progress"))

    def grow(self, arguments: str) -> None:
        """Add more arguments; write the part that may be shown."""
        self._text.append(arguments)
        if self._kind == CUSTOM.kind:
            self._show("custom_tool_call_input", self._input.feed(arguments))
        elif self._kind == FUNCTION.kind:
            self._show("function_call_arguments", self._arguments.feed(arguments))

    def close(self, status: str) -> dict[str, Any] | None:
        """Write the last events; with status `incomplete` the call was cut, and no `done` event is written."""
        arguments = "".join(self._text)
        if status != "completed":
            return self._writer.cut_call(self._call, self._id, open_arguments(arguments))
        arguments = arguments or "{}"
        item = self._item(arguments, status)
        if item["type"] != self._kind or self._kind not in (FUNCTION.kind, CUSTOM.kind):
            self._emit("output_item.added", item=item)
        elif self._kind == CUSTOM.kind:
            text, shown = input_of(arguments), "".join(self._shown)
            self._show("custom_tool_call_input", text[len(shown) :] if text.startswith(shown) else "")
            self._emit("custom_tool_call_input.done", item_id=self._id, input=text)
        else:
            self._show("function_call_arguments", self._arguments.waiting)
            self._emit("function_call_arguments.done", item_id=self._id, arguments=arguments)
        self._emit("output_item.done", item=item)
        return item

    def _show(self, event: str, text: str) -> None:
        if text:
            self._shown.append(text)
            self._emit(f"{event}.delta", item_id=self._id, delta=text)

    def _item(self, arguments: str, status: str) -> dict[str, Any]:
        function = {**self._call["function"], "arguments": arguments}
        return self._writer.call({**self._call, "function": function}, self._place, status)


class TextOfInput:
    """A parser for the text of `{"input": "..."}` that is fed with pieces of the JSON. Arguments of any other form
    give no text."""

    def __init__(self) -> None:
        self._waiting = ""
        self._inside: bool | None = None  # whether the text continues; None before its beginning is seen

    def feed(self, arguments: str) -> str:
        """Add JSON; return the text that is complete now."""
        if self._inside is False:
            return ""
        waiting = self._waiting + arguments
        if self._inside is None:
            begin = INPUT.match(waiting)
            if begin is None:
                self._waiting, self._inside = waiting, False if len(waiting) > MAX_BEGINNING else None
                return ""
            self._inside, waiting = True, waiting[begin.end() :]
        whole = WHOLE.match(waiting)
        assert whole is not None  # the pattern also matches the empty string
        self._waiting = waiting[whole.end() :]
        self._inside = not self._waiting.startswith('"')  # the closing quote
        return str(json.loads(f'"{whole[0]}"', strict=False))
