"""The route `/v1/messages` (Anthropic), translated to and from chat completions as in SGLang."""

import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import orjson
from aiohttp import web

from miles_router.testing.worker.routes.chat import chat_answer, chat_chunks
from miles_router.testing.worker.routes.native import admitted
from miles_router.testing.worker.visit import Visit
from miles_router.testing.worker.wire.chat_request import ChatInput, parse_chat

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

_USAGE = {"include_usage": True, "continuous_usage_stats": True}


async def messages(visit: Visit) -> web.StreamResponse:
    """Handle POST /v1/messages."""
    body = visit.json()
    absent = [f"{name}: Field required" for name in ("model", "messages", "max_tokens") if name not in body]
    if absent:
        return await _refuse(visit, "; ".join(absent))
    try:
        chat = parse_chat(visit, {**_chat_body(body), "stream_options": _USAGE})
        async with admitted(visit, chat.given):
            if not chat.given.stream:
                return await visit.reply.json(_message(await chat_answer(visit, chat)))
            async for name, event in _events(visit, chat):
                await visit.reply.event(event, name)
    except (ValueError, KeyError) as error:
        return await _refuse(visit, str(error))
    return await visit.reply.end()


async def _refuse(visit: Visit, message: str) -> web.StreamResponse:
    problem = {"type": "invalid_request_error", "message": message}
    return await visit.reply.json({"type": "error", "error": problem}, 400)


def _chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Translate an Anthropic request into a chat completions request."""
    translated: list[dict[str, Any]] = []
    if body.get("system"):
        translated.append({"role": "system", "content": _text(body["system"])})
    for message in body["messages"]:
        translated += _chat_messages(message)
    chat = {
        "model": body.get("model"),
        "messages": translated,
        "max_tokens": body["max_tokens"],
        "stop": body.get("stop_sequences"),
        **{name: body[name] for name in ("temperature", "top_p", "top_k", "stream") if body.get(name) is not None},
    }
    if body.get("tools"):
        chat["tools"] = [_chat_tool(tool) for tool in body["tools"]]
        chat["tool_choice"] = _chat_tool_choice(body.get("tool_choice"))
    return chat


def _chat_messages(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for block in blocks:
        if block.get("type") == "tool_result":
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _text(block.get("content"))}
    rest = [block for block in blocks if block.get("type") in ("text", "tool_use")]
    calls = [_chat_call(block) for block in rest if block["type"] == "tool_use"]
    if rest:
        yield {"role": message["role"], "content": _text(rest), **({"tool_calls": calls} if calls else {})}


def _chat_call(block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = orjson.dumps(block.get("input") or {}).decode()
    return {"id": block.get("id"), "type": "function", "function": {"name": block["name"], "arguments": arguments}}


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "description": tool.get("description"), "parameters": tool.get("input_schema")}
    return {"type": "function", "function": function}


def _chat_tool_choice(choice: Mapping[str, Any] | None) -> Any:
    kind = (choice or {}).get("type", "auto")
    if kind == "tool":
        return {"type": "function", "function": {"name": (choice or {})["name"]}}
    return {"any": "required", "none": "none"}.get(kind, "auto")


def _text(content: Any) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    return "\n".join(block["text"] for block in content if block.get("type") == "text")


def _message(answer: Mapping[str, Any]) -> dict[str, Any]:
    choice = answer["choices"][0]
    blocks: list[dict[str, Any]] = []
    if choice["message"]["content"] or not choice["message"].get("tool_calls"):
        blocks.append({"type": "text", "text": choice["message"]["content"]})
    blocks += [_tool_use(call) for call in choice["message"].get("tool_calls") or ()]
    usage = {"input_tokens": answer["usage"]["prompt_tokens"], "output_tokens": answer["usage"]["completion_tokens"]}
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "content": blocks,
        "model": answer["model"],
        "stop_reason": _STOP_REASONS.get(choice["finish_reason"], "end_turn"),
        "usage": usage,
    }


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {
        "type": "tool_use",
        "id": call["id"],
        "name": function["name"],
        "input": orjson.loads(function["arguments"]),
    }


async def _events(visit: Visit, chat: ChatInput) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yield the stream's (event name, data) pairs. Content blocks open and close as text and calls alternate."""
    writer = _EventWriter(chat.model)
    async for chunk in chat_chunks(visit, chat):
        for event in writer.events(chunk):
            yield event["type"], event
    for event in writer.last_events():
        yield event["type"], event


class _EventWriter:
    def __init__(self, model: str) -> None:
        self._model = model
        self._open: str | None = None
        self._index = -1
        self._stop_reason = "end_turn"
        self._usage = {"output_tokens": 0}
        self._started = False

    def events(self, chunk: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        usage = chunk.get("usage")
        if usage:
            self._usage = {"output_tokens": usage["completion_tokens"]}
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if choice["finish_reason"]:
                self._stop_reason = _STOP_REASONS.get(choice["finish_reason"], "end_turn")
            if delta.get("content") or delta.get("tool_calls") or choice["finish_reason"]:
                yield from self._start(usage["prompt_tokens"] if usage else 0)
            if delta.get("content"):
                yield from self._block("text", {"type": "text", "text": ""})
                yield self._content({"type": "text_delta", "text": delta["content"]})
            for call in delta.get("tool_calls") or ():
                yield from self._call(call)

    def last_events(self) -> Iterator[dict[str, Any]]:
        yield from self._start()
        yield from self._close()
        yield {"type": "message_delta", "delta": {"stop_reason": self._stop_reason}, "usage": self._usage}
        yield {"type": "message_stop"}

    def _start(self, prompt_tokens: int = 0) -> Iterator[dict[str, Any]]:
        if self._started:
            return
        self._started = True
        message = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._model,
            "usage": {"input_tokens": prompt_tokens, "output_tokens": 0},
        }
        yield {"type": "message_start", "message": message}

    def _call(self, call: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        function = call["function"]
        if function["name"]:
            yield from self._close()
            block = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
            yield from self._block("tool_use", block)
        if function["arguments"]:
            yield self._content({"type": "input_json_delta", "partial_json": function["arguments"]})

    def _block(self, kind: str, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self._open == kind:
            return
        yield from self._close()
        self._open = kind
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._open is not None:
            self._open = None
            yield {"type": "content_block_stop", "index": self._index}

    def _content(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}
