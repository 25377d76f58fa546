"""Parse tool calls in generated text, in the format of SGLang's `qwen25` parser, and generate required ones."""

import json
import random
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import orjson

from miles_router.testing.worker.model.constrained import instance_of, spelled, stop_id
from miles_router.testing.worker.model.vocabulary import Tokenizer

_BEGIN = "<tool_call>\n"
_END = "\n</tool_call>"


def written_call(name: str, arguments: object) -> str:
    """Return a call as models write it. Arguments given as a string are inserted unchanged."""
    spelled_out = arguments if isinstance(arguments, str) else spaced(arguments)
    return f'{_BEGIN}{{"name": {spaced(name)}, "arguments": {spelled_out}}}{_END}'


def spaced(value: object) -> str:
    """Encode JSON as SGLang's parsers do, with spaces after `:` and `,`."""
    return json.dumps(value, ensure_ascii=False)


def required_call(tools: Sequence[Mapping[str, Any]], choice: Any, tokenizer: Tokenizer, seed: int) -> list[int]:
    """Return the ids of a valid call, with a stop id at the end. It calls the tool in `choice`, else a random one."""
    source = random.Random(seed)
    names = [tool["function"]["name"] for tool in tools]
    wanted = choice["function"]["name"] if isinstance(choice, Mapping) else source.choice(names)
    function = tools[names.index(wanted)]["function"]
    arguments = orjson.dumps(instance_of(function.get("parameters") or {"type": "object"}, source)).decode()
    call = f'{{"name":{orjson.dumps(wanted).decode()}, "arguments":{arguments}}}'
    ids = [*tokenizer.encode(_BEGIN), *spelled(call, tokenizer, source), *tokenizer.encode(_END)]
    return [*ids, stop_id(tokenizer)]


def parse_calls(text: str, names: Collection[str]) -> tuple[str, list[dict[str, Any]] | None]:
    """Split a finished text into (text before the calls, calls). Without a call return (the whole text, None).

    A malformed call, or one of a tool not in `names`, is dropped as in SGLang.
    """
    if _BEGIN not in text:
        return text, None
    calls: list[dict[str, Any]] = []
    for block in text.split(_BEGIN)[1:]:
        function = _function_of(block.partition(_END)[0], names) if _END in block else None
        if function is not None:
            calls.append({"id": _call_id(), "index": len(calls), "type": "function", "function": function})
    return text.partition(_BEGIN)[0].strip(), calls or None


def _function_of(block: str, names: Collection[str]) -> dict[str, str] | None:
    try:
        parsed = orjson.loads(block.strip())
    except orjson.JSONDecodeError:
        return None
    if not isinstance(parsed, dict) or parsed.get("name") not in names:
        return None
    arguments = parsed.get("arguments", parsed.get("parameters", {}))
    return {"name": parsed["name"], "arguments": spaced(arguments)}


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class ToolCallStream:
    """A streaming parser that splits text into visible text and tool call deltas.

    It holds back text that may be the start of a call.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._buffer = ""
        self._inside = False
        self._named = False
        self._arguments = _SpacedArguments()
        self.calls = 0

    def push(self, delta: str, *, last: bool) -> list[str | dict[str, Any]]:
        """Parse more text. Return visible texts and call deltas in order. `last` releases held-back text."""
        self._buffer += delta
        parts: list[str | dict[str, Any]] = []
        while True:
            before = self._buffer
            parts += self._inside_call() if self._inside else self._outside_call(last=last)
            if self._buffer == before:
                return parts

    def closed(self) -> list[dict[str, Any]]:
        """Return the delta that SGLang adds if an answer ends within the arguments of a call: it closes their JSON,
        although the model did not sample that."""
        end = self._arguments.end() if self._inside and self._named else ""
        return [self._delta(None, None, end)] if end else []

    def _outside_call(self, *, last: bool) -> list[str | dict[str, Any]]:
        visible, begin, rest = self._buffer.partition(_BEGIN)
        if begin:
            self._inside, self._named, self._buffer = True, False, rest
            self._arguments = _SpacedArguments()
        else:
            shown = len(visible) if last else len(visible) - overlap(visible, _BEGIN)
            if self.calls and not visible[:shown].strip():
                shown = 0
            visible, self._buffer = visible[:shown], visible[shown:]
        between = self.calls and not visible.strip()  # white space between calls is not shown
        return [visible] if visible and not between else []

    def _inside_call(self) -> list[str | dict[str, Any]]:
        """Return a delta with the name first, then deltas whose arguments join to the call's."""
        parts: list[str | dict[str, Any]] = []
        head = None if self._named else _HEAD.match(self._buffer)
        if head and head[1] in self._names:
            self._named, self._buffer = True, self._buffer[head.end() :]
            parts.append(self._delta(_call_id(), head[1], ""))
        arguments = self._arguments.push(self._take_arguments())
        if self._named and arguments:
            parts.append(self._delta(None, None, arguments))
        if not self._inside and self._named:
            self.calls += 1
        return parts

    def _take_arguments(self) -> str:
        """Remove from the buffer and return text that is certainly part of the arguments: neither the closing brace of
        the call's object nor the end marker."""
        block, end, rest = self._buffer.partition(_END)
        if end:
            self._buffer, self._inside = rest, False
            return block.rstrip().removesuffix("}")
        if not self._named:
            return ""
        tail = _POSSIBLE_TAIL.search(block)
        shown = tail.start() if tail else len(block)
        self._buffer = block[shown:]
        return block[:shown]

    def _delta(self, call_id: str | None, name: str | None, arguments: str) -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        return {"id": call_id, "index": self.calls, "type": "function", "function": function}


class _SpacedArguments:
    """A converter of streamed JSON to the form of `spaced`. It keeps the spelling of numbers."""

    def __init__(self) -> None:
        self._all = ""
        self._rest = ""  # an incomplete escape
        self._in_string = False

    def end(self) -> str:
        """Return the quotes and brackets that complete the JSON so far, or "" if they do not make it valid."""
        opened: list[str] = []
        for character in _STRING.sub("", self._all):
            if character in "{[":
                opened.append("}" if character == "{" else "]")
            elif character in "}]":
                opened.pop()
        end = '"' * self._in_string + "".join(reversed(opened))
        try:
            json.loads(self._all + end)
        except json.JSONDecodeError:
            return ""
        return end

    def push(self, piece: str) -> str:
        """Convert the next piece of JSON."""
        added = self._added(piece)
        self._all += added
        return added

    def _added(self, piece: str) -> str:
        text, written, at = self._rest + piece, [], 0
        while match := _JSON_PIECE.match(text, at):
            written.append(self._written(match[0]))
            at = match.end()
        self._rest = text[at:]
        return "".join(written)

    def _written(self, piece: str) -> str:
        if piece == '"':
            self._in_string = not self._in_string
        elif self._in_string:
            return spaced(json.loads(f'"{piece}"'))[1:-1] if piece[0] == "\\" else piece
        elif piece in ":,":
            return piece + " "
        return "" if piece.isspace() else piece


_STRING = re.compile(r'"(?:[^"\\]|\\.)*("|$)', re.DOTALL)
# A character or a complete escape. It does not match an incomplete escape.
_JSON_PIECE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\[^u]|[^\\]", re.DOTALL
)
# Closing braces, and what may follow the last one: a part of the end marker.
_POSSIBLE_TAIL = re.compile(r"[}\s]+[</a-z_>]*$")
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)')


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest proper prefix of `marker` with which `text` ends."""
    longest = min(len(marker) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
