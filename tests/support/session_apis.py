"""The APIs that agents speak to a session, behind one way to ask, to read and to send back: `Api`.

Items are what an API calls its history: chat messages, Anthropic's messages, or items of Responses. A table of cases in
one test names the case that failed by `case(...)`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest

from tests.support.http import Pairs, RawReply
from tests.support.session_trial import CHAT, SessionTrial, user

COMPLETIONS, MESSAGES, RESPONSES = "/v1/completions", "/v1/messages", "/v1/responses"
#: The fields of a request's text and of the length of its answer.
FIELDS = {
    CHAT: ("messages", "max_tokens"),
    COMPLETIONS: ("prompt", "max_tokens"),
    MESSAGES: ("messages", "max_tokens"),
    RESPONSES: ("input", "max_output_tokens"),
}
PARAMETERS = {"type": "object", "properties": {"zone": {"type": "string"}}}


@contextlib.contextmanager
def case(*names: object) -> Iterator[None]:
    """Name the case of a table in what fails within."""
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        raise AssertionError(f"{', '.join(map(str, names))}: {error}") from error


def given(holder: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Return an object with a field of this value; without the field where it is `...`."""
    kept = {each: held for each, held in holder.items() if each != name}
    return kept if value is ... else {**kept, name: value}


@dataclass
class Said:
    """One answer, whole or streamed, in words that the APIs share."""

    items: list[Any]  # as its agent sends it back
    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)  # id, name, arguments
    end: str | None = None


@dataclass(frozen=True)
class Api:
    """One API. `named`: the session is named by a header, not by its address."""

    path: str
    named: bool = False

    def __str__(self) -> str:
        return self.path.removeprefix("/v1/").partition("/")[0] + (", by a header" if self.named else "")

    # Asking

    def body(self, items: Any, most: int = 64, *, stream: bool = False, **fields: Any) -> dict[str, Any]:
        """Return a request with this history, or this prompt."""
        text, length = FIELDS[self.path]
        return {"model": "m", text: items, length: most, "stream": stream, **fields}

    async def post(self, trial: SessionTrial, session: str, body: Any, headers: Pairs = ()) -> RawReply:
        if self.named:
            return await trial.ask("POST", self.path, body, [("X-Session-Id", session), *headers])
        return await trial.ask("POST", f"/sessions/{session}{self.path}", body, headers)

    async def ask(
        self, trial: SessionTrial, session: str, most: int, text: str = "Hi", *, stream: bool = False, **fields: Any
    ) -> RawReply:
        """Send one turn that begins a line, and return its reply, an error or not."""
        items: Any = [user(text)] if FIELDS[self.path][0] == "messages" else text
        return await self.post(trial, session, self.body(items, most, stream=stream, **fields))

    async def turn(
        self, trial: SessionTrial, session: str, items: Any, most: int = 64, *, stream: bool = False, **fields: Any
    ) -> Said:
        """Send one turn that must be answered."""
        body = self.body(items, most, stream=stream, **fields)
        return self.read(await self.post(trial, session, body), stream=stream)

    async def refused(self, trial: SessionTrial, session: str, items: Any, **fields: Any) -> Any:
        """Send a turn that must be refused before an engine is asked or anything recorded. Return the error."""
        before, asked = await trial.records(session), len(trial.log)
        reply = await self.post(trial, session, self.body(items, **fields))
        assert reply.status == 400, reply.body
        assert (await trial.records(session), len(trial.log)) == (before, asked)
        return reply.json()["error"]

    def tools(self, *names: str, **fields: Any) -> list[Any]:
        """Return functions of these names, as this API takes them."""
        if self.path == MESSAGES:
            return [{"name": name, "input_schema": PARAMETERS, **fields} for name in names]
        functions = [{"name": name, "parameters": PARAMETERS, **fields} for name in names]
        if self.path == RESPONSES:
            return [{"type": "function", **each} for each in functions]
        return [{"type": "function", "function": each} for each in functions]

    # Histories

    def called(self, *calls: tuple[Any, str, Any]) -> list[Any]:
        """Return an answer with calls: id, name, and arguments as the API holds them. `...` leaves a field out."""
        if self.path == MESSAGES:
            blocks = [
                given(given({"type": "tool_use", "name": name}, "id", each), "input", arguments)
                for each, name, arguments in calls
            ]
            return [{"role": "assistant", "content": blocks}]
        functions = [given({"name": name}, "arguments", arguments) for _, name, arguments in calls]
        pairs = [*zip((each for each, _, _ in calls), functions, strict=True)]
        if self.path == RESPONSES:
            return [given({"type": "function_call", **function}, "call_id", each) for each, function in pairs]
        made = [given({"type": "function", "function": function}, "id", each) for each, function in pairs]
        return [{"role": "assistant", "content": "", "tool_calls": made}]

    def arguments(self, text: str) -> Any:
        """Return arguments, given as JSON, as the API holds them."""
        return orjson.loads(text) if self.path == MESSAGES else text

    def results(self, *results: tuple[Any, Any]) -> list[Any]:
        """Return results of calls: id and content. `...` leaves the id out."""
        if self.path == MESSAGES:
            blocks = [given({"type": "tool_result", "content": said}, "tool_use_id", each) for each, said in results]
            return [{"role": "user", "content": blocks}]
        if self.path == RESPONSES:
            kind = "function_call_output"
            return [given({"type": kind, "output": said}, "call_id", each) for each, said in results]
        return [given({"role": "tool", "content": said}, "tool_call_id", each) for each, said in results]

    def says(self, *parts: Any) -> Any:
        """Return a user's message of parts; a text is a part of the API's own."""
        kind = "input_text" if self.path == RESPONSES else "text"
        return {
            "role": "user",
            "content": [{"type": kind, "text": part} if isinstance(part, str) else part for part in parts],
        }

    # Reading

    def answers(self, reply: RawReply, *, stream: bool) -> list[Any]:
        """Return the answer, or all events of a stream."""
        assert reply.status == 200, reply.body
        if not stream:
            return [reply.json()]
        lines = [line for line in reply.body.split(b"\n") if line.startswith(b"data: {")]
        return [orjson.loads(line.removeprefix(b"data: ")) for line in lines]

    def read(self, reply: RawReply, *, stream: bool) -> Said:
        """Return what an answer says. A stream is put together from its events, as official clients do."""
        answers = self.answers(reply, stream=stream)
        end = self.end(reply, stream=stream)
        if self.path == RESPONSES:
            done = [each["item"] for each in answers if each.get("type") == "response.output_item.done"]
            return _read_items(done if stream else answers[0]["output"], end)
        if self.path == MESSAGES:
            return _read_blocks(_blocks(answers) if stream else answers[0]["content"], end)
        return _read_choices([choice for each in answers for choice in each["choices"]], end)

    def end(self, reply: RawReply, *, stream: bool) -> str | None:
        """Return why an answer ended."""
        for said in reversed(self.answers(reply, stream=stream)):
            if self.path == RESPONSES:
                response = said.get("response", said)
                return str((response["incomplete_details"] or {}).get("reason", response["status"]))
            if self.path == MESSAGES:
                reason = said.get("delta", said).get("stop_reason")
            else:
                reason = said["choices"][0]["finish_reason"] if said["choices"] else None
            if reason is not None:
                return str(reason)
        return None

    def model(self, reply: RawReply, *, stream: bool) -> str:
        """Return the model that an answer names."""
        first = self.answers(reply, stream=stream)[0]
        return str(first.get("message", first.get("response", first))["model"])

    def refusal(self, reply: RawReply, *, stream: bool = False) -> tuple[str, str]:
        """Return the code and the message of an error."""
        if self.path == RESPONSES and stream and reply.status == 200:
            created, _, failed = self.answers(reply, stream=True)
            assert (created["type"], failed["type"]) == ("response.created", "response.failed")
            error = failed["response"]["error"]
            return error["code"], error["message"]
        error = reply.json()["error"]
        if self.path == MESSAGES:
            assert (reply.json()["type"], error["type"]) == ("error", "invalid_request_error")
            return error["details"]["error_code"], error["message"]
        return error.get("code") or error["type"], error["message"]


def _read_items(items: Sequence[Any], end: str | None) -> Said:
    said = Said(list(items), end=end)
    for item in items:
        if item["type"] == "function_call":
            said.calls.append((item["call_id"], item["name"], item["arguments"]))
        text = "".join(part["text"] for part in item.get("content") or ())
        said.reasoning += text if item["type"] == "reasoning" else ""
        said.text += text if item["type"] == "message" else ""
    return said


def _read_blocks(blocks: Sequence[Any], end: str | None) -> Said:
    said = Said([{"role": "assistant", "content": list(blocks)}], end=end)
    for block in blocks:
        said.text += block.get("text", "")
        said.reasoning += block.get("thinking", "")
        if block["type"] == "tool_use":
            said.calls.append((block["id"], block["name"], block.pop("written", None) or json.dumps(block["input"])))
    return said


def _blocks(events: Sequence[Any]) -> list[Any]:
    """Put the blocks of a stream together. A call keeps its arguments as they were `written`."""
    blocks: dict[int, Any] = {}
    for each in events:
        if each["type"] == "content_block_start":
            blocks[each["index"]] = dict(each["content_block"])
        elif each["type"] == "content_block_delta":
            block, delta = blocks[each["index"]], each["delta"]
            for name in ("text", "thinking", "signature"):
                if name in delta:
                    block[name] = block.get(name, "") + delta[name]
            if "partial_json" in delta:
                block["written"] = block.get("written", "") + delta["partial_json"]
    for block in blocks.values():
        with contextlib.suppress(ValueError):
            block["input"] = json.loads(block["written"]) if block.get("written") else block.get("input", {})
        if block["type"] != "tool_use":
            block.pop("input", None)
    return [block for _, block in sorted(blocks.items())]


def _read_choices(choices: Sequence[Any], end: str | None) -> Said:
    said = Said([], end=end)
    calls: dict[int, list[str]] = {}
    for choice in choices:
        part = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
        said.text += part.get("content") or ""
        said.reasoning += part.get("reasoning_content") or ""
        for place, piece in enumerate(part.get("tool_calls") or ()):
            one = calls.setdefault(place if "message" in choice else piece["index"], ["", "", ""])
            told = (piece.get("id"), piece["function"].get("name"), piece["function"].get("arguments"))
            one[:] = [before + (new or "") for before, new in zip(one, told, strict=True)]
    said.calls = [(call_id, name, arguments) for call_id, name, arguments in calls.values()]
    message: dict[str, Any] = {"role": "assistant", "content": said.text}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.calls:
        message["tool_calls"] = [
            {"id": each, "type": "function", "function": {"name": name, "arguments": arguments}}
            for each, name, arguments in said.calls
        ]
    said.items = [message]
    return said


APIS = [Api(path, named) for path in FIELDS for named in (False, True)]
#: Those whose turns are chat's.
CHATS = [api for api in APIS if api.path != COMPLETIONS]
#: Each API once, and those with a history.
PLAIN = [Api(path) for path in FIELDS]
TALKS = [Api(CHAT), Api(MESSAGES), Api(RESPONSES)]
BOTH = (False, True)
