"""Tool calls in generated text, in the format of SGLang's `qwen25` parser, and making one up when one is required."""

import random
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from miles_router.testing.constrained import instance_of, spelled, stop_id
from miles_router.testing.vocabulary import Tokenizer

_BEGIN = "<tool_call>\n"
_END = "\n</tool_call>"


def required_call(tools: Sequence[Mapping[str, Any]], choice: Any, tokenizer: Tokenizer, seed: int) -> list[int]:
    """Ids of a well-formed call of one of the tools (or of the one named), with a stop id at the end."""
    source = random.Random(seed)
    names = [tool["function"]["name"] for tool in tools]
    wanted = choice["function"]["name"] if isinstance(choice, Mapping) else source.choice(names)
    function = tools[names.index(wanted)]["function"]
    arguments = orjson.dumps(instance_of(function.get("parameters") or {"type": "object"}, source)).decode()
    call = f'{{"name":{orjson.dumps(wanted).decode()}, "arguments":{arguments}}}'
    ids = [*tokenizer.encode(_BEGIN), *spelled(call, tokenizer, source), *tokenizer.encode(_END)]
    return [*ids, stop_id(tokenizer)]


def parse_calls(text: str) -> tuple[str, list[dict[str, Any]] | None]:
    """(text outside calls, calls) of a finished text; None and the whole text when no call begins in it."""
    if _BEGIN not in text:
        return text, None
    calls = [call for block in text.split(_BEGIN)[1:] if (call := _call_of(block.partition(_END)[0]))]
    for index, call in enumerate(calls):
        call["index"] = index
    return text.partition(_BEGIN)[0].strip(), calls or None


def _call_of(block: str) -> dict[str, Any] | None:
    try:
        parsed = orjson.loads(block.strip())
    except orjson.JSONDecodeError:
        return None
    if not isinstance(parsed, dict) or "name" not in parsed:
        return None
    arguments = orjson.dumps(parsed.get("arguments", parsed.get("parameters", {}))).decode()
    function = {"name": parsed["name"], "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "index": 0, "type": "function", "function": function}


class ToolCallStream:
    """Splits a growing text into visible text and calls; what may begin a call is held back."""

    def __init__(self) -> None:
        self._buffer = ""
        self.calls = 0

    def push(self, delta: str, *, last: bool) -> list[str | dict[str, Any]]:
        """Visible texts and tool call deltas, in order."""
        self._buffer += delta
        parts: list[str | dict[str, Any]] = []
        while (end := self._buffer.find(_END, max(0, self._buffer.find(_BEGIN)))) >= 0 and _BEGIN in self._buffer:
            visible, _, block = self._buffer[:end].partition(_BEGIN)
            parts += [visible] if visible.strip() else []
            parts += self._deltas(_call_of(block))
            self._buffer = self._buffer[end + len(_END) :]
        ready = self._ready(last=last)
        if ready:
            parts.append(self._buffer[:ready])
            self._buffer = self._buffer[ready:]
        return parts

    def _deltas(self, call: dict[str, Any] | None) -> list[str | dict[str, Any]]:
        """First the name, then the arguments, as SGLang streams them."""
        if call is None:
            return []
        index, function = self.calls, call["function"]
        self.calls += 1
        head = {**call, "index": index, "function": {"name": function["name"], "arguments": ""}}
        rest = {"id": None, "index": index, "type": "function"}
        return [head, {**rest, "function": {"name": None, "arguments": function["arguments"]}}]

    def _ready(self, *, last: bool) -> int:
        """How much of the buffer is certainly visible text."""
        begun = self._buffer.find(_BEGIN)
        if begun >= 0:
            return begun
        if last:
            return len(self._buffer)
        longest = min(len(_BEGIN) - 1, len(self._buffer))
        held = next((size for size in range(longest, 0, -1) if self._buffer.endswith(_BEGIN[:size])), 0)
        return len(self._buffer) - held
