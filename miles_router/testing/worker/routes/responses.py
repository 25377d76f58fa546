"""The route `/v1/responses` (OpenAI), translated to and from chat completions as in SGLang without
`--enable-response-store`. It supports texts, function tools and reasoning, and stores nothing."""

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import orjson
from aiohttp import web

from miles_router.testing.worker.routes.chat import chat_answer, chat_chunks
from miles_router.testing.worker.routes.native import admitted
from miles_router.testing.worker.visit import Refusal, Visit
from miles_router.testing.worker.wire.chat_request import ChatInput, parse_chat
from miles_router.testing.worker.wire.openai_parts import require_json

_NO_STORE = (
    "Response store is disabled. Stateful Responses require --enable-response-store on a standalone server; response "
    "storage is unavailable in PD mode."
)
_USAGE = {"include_usage": True}
_ECHOED = (
    *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "previous_response_id", "reasoning"),
    *("store", "temperature", "text", "tool_choice", "tools", "top_p", "truncation", "user"),
)
_DEFAULTS = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "store": True, "truncation": "disabled"}
#: SGLang subtracts so many tokens from `max_output_tokens`.
_KEPT_TOKENS = 2


async def responses(visit: Visit) -> web.StreamResponse:
    """Handle POST /v1/responses."""
    require_json(visit)
    body = visit.json()
    if body.get("previous_response_id") is not None:
        raise _refusal(_NO_STORE, "previous_response_id")
    if not isinstance(body.get("input"), (str, list)):
        raise _refusal("input: Field required", "input")
    try:
        # The body has no model: SGLang never applies an adapter that the model name contains here.
        chat = parse_chat(visit, {**_chat_body(body), "stream_options": _USAGE})
        chat.model = str(body.get("model") or "default")
        writer = _Writer(body)
        async with admitted(visit, chat.given):
            if not chat.given.stream:
                return await visit.reply.json(writer.whole(await chat_answer(visit, chat)))
            async for event in _events(visit, chat, writer):
                await visit.reply.send(f"event: {event['type']}\ndata: ".encode() + orjson.dumps(event) + b"\n\n")
    except (ValueError, KeyError) as error:
        raise _refusal(str(error), None) from error
    return await visit.reply.end()


def _refusal(message: str, param: str | None) -> Refusal:
    return Refusal(400, {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": 400}})


def _chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a Responses request into a chat completions request."""
    given = body["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages = [message for item in items for message in _chat_messages(item)]
    if body.get("instructions"):
        messages.insert(0, {"role": "system", "content": body["instructions"]})
    asked = body.get("max_output_tokens")
    chat = {
        "messages": _joined(messages),
        "max_tokens": None if asked is None else max(1, asked - _KEPT_TOKENS),
        **{name: body[name] for name in ("temperature", "top_p", "stream") if body.get(name) is not None},
    }
    tools = [tool for tool in body.get("tools") or () if tool.get("type") == "function"]
    if tools:
        own = ("name", "description", "parameters", "strict")
        functions = [{name: tool[name] for name in own if tool.get(name) is not None} for tool in tools]
        chat["tools"] = [{"type": "function", "function": function} for function in functions]
        chat["tool_choice"] = _chat_tool_choice(body.get("tool_choice", "auto"))
    return chat


def _chat_tool_choice(choice: Any) -> Any:
    named = isinstance(choice, Mapping) and choice.get("type") == "function"
    return {"type": "function", "function": {"name": choice["name"]}} if named else choice


def _chat_messages(item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    kind = item.get("type", "message")
    if kind == "message":
        role = "system" if item["role"] == "developer" else item["role"]
        yield {"role": role, "content": _text(item["content"])}
    elif kind == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        yield {"role": "assistant", "content": None, "tool_calls": [call]}
    elif kind == "function_call_output":
        yield {"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"])}


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge consecutive assistant messages: an answer's text and calls are separate items of the request."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        last = joined[-1] if joined else {}
        if message["role"] == last.get("role") == "assistant":
            calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
            joined[-1] = {**last, "content": last["content"] or message["content"], "tool_calls": calls}
        else:
            joined.append(message)
    return joined


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return str(content or "")


async def _events(visit: Visit, chat: ChatInput, writer: "_Writer") -> AsyncIterator[dict[str, Any]]:
    for event in writer.first_events(chat.model):
        yield event
    async for chunk in chat_chunks(visit, chat):
        for event in writer.events(chunk):
            yield event
    for event in writer.last_events():
        yield event


class _Writer:
    """The response to one request: whole, or as stream events of its items, of which one is open at a time."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._about = {name: body.get(name, _DEFAULTS.get(name)) for name in _ECHOED}
        self._response: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
        }
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._text = ""
        self._finish = "stop"
        self._usage: dict[str, Any] | None = None
        self._number = 0

    def whole(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Return the response for a whole chat answer."""
        choice = answer["choices"][0]
        message = choice["message"]
        if message["reasoning_content"]:
            self._output.append(_reasoning(message["reasoning_content"]))
        if message["content"] or not message.get("tool_calls"):
            self._output.append(_message(message["content"] or ""))
        self._output += [_call(call["id"], **call["function"]) for call in message.get("tool_calls") or ()]
        self._finish, self._usage = choice["finish_reason"], answer["usage"]
        self._response["model"] = answer["model"]
        return self._made(self._status)

    def first_events(self, model: str) -> Iterator[dict[str, Any]]:
        """Yield the first events of a stream."""
        self._response["model"] = model
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._made("in_progress"))

    def events(self, chunk: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of one chat chunk."""
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk["choices"]:
            delta = choice["delta"]
            self._finish = choice["finish_reason"] or self._finish
            if delta.get("reasoning_content"):
                yield from self._grow("reasoning", delta["reasoning_content"])
            if delta.get("content"):
                yield from self._grow("message", delta["content"])
            for call in delta.get("tool_calls") or ():
                if call["function"]["name"]:
                    yield from self._begin(_call(call["id"], call["function"]["name"], "", "in_progress"))
                if call["function"]["arguments"]:
                    yield from self._grow("function_call", call["function"]["arguments"])

    def last_events(self) -> Iterator[dict[str, Any]]:
        """Yield the last events of a stream."""
        yield from self._close()
        yield self._event(f"response.{self._status}", response=self._made(self._status))

    @property
    def _status(self) -> str:
        return {"length": "incomplete", "abort": "failed"}.get(self._finish, "completed")

    def _made(self, status: str) -> dict[str, Any]:
        done = status != "in_progress"
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        usage = _usage(self._usage) if done and self._usage else None
        return {
            **self._response,
            "status": status,
            "output": list(self._output),
            "usage": usage,
            "error": None,
            "incomplete_details": reason,
            **self._about,
        }

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _of_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        assert self._open is not None
        return self._event(kind, item_id=self._open["id"], output_index=len(self._output), **fields)

    def _begin(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self._open, self._text = item, ""
        yield self._event("response.output_item.added", output_index=len(self._output), item=item)
        if item["type"] != "function_call":
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            part: dict[str, Any] = {"type": kind, "text": "", **({"annotations": []} if kind == "output_text" else {})}
            yield self._of_item("response.content_part.added", content_index=0, part=part)

    def _grow(self, kind: str, delta: str) -> Iterator[dict[str, Any]]:
        if self._open is None or self._open["type"] != kind:
            made = _reasoning("", "in_progress") if kind == "reasoning" else _message("", "in_progress")
            yield from self._begin({**made, "content": []})
        self._text += delta
        if kind == "function_call":
            yield self._of_item("response.function_call_arguments.delta", delta=delta)
        else:
            own: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            yield self._of_item(f"response.{_PARTS[kind]}.delta", content_index=0, delta=delta, **own)

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._open is None:
            return
        kind, item_id = self._open["type"], self._open["id"]
        if kind == "function_call":
            item = {**self._open, "arguments": self._text, "status": "completed"}
            yield self._of_item("response.function_call_arguments.done", name=item["name"], arguments=self._text)
        else:
            made = _reasoning(self._text) if kind == "reasoning" else _message(self._text)
            item = {**made, "id": item_id}
            own: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            yield self._of_item(f"response.{_PARTS[kind]}.done", content_index=0, text=self._text, **own)
            yield self._of_item("response.content_part.done", content_index=0, part=item["content"][0])
        yield self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._open = None


_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


def _message(text: str, status: str = "completed") -> dict[str, Any]:
    part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": [], "logprobs": None}
    own = {"role": "assistant", "status": status}
    return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "content": [part], **own}


def _reasoning(text: str, status: str = "completed") -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": text}
    return {"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "summary": [], "content": [part], "status": status}


def _call(call_id: str, name: str, arguments: str, status: str = "completed") -> dict[str, Any]:
    own = {"call_id": call_id, "name": name, "arguments": arguments, "status": status}
    return {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", **own}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": usage["reasoning_tokens"]},
        "total_tokens": usage["total_tokens"],
    }
