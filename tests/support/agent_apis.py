"""How agents speak to their session: each API with its official client, behind one way to ask.

A conversation is chat messages whatever the API; an answer carries, as `native`, what it was in its own API, and goes
back as that.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar

import anthropic
import openai

from tests.support.waiting import PATIENCE

Message = Mapping[str, Any]
CLIENT: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 10 * PATIENCE}


def _openai(address: str) -> openai.AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(verify=False)  # reading this machine's certificates takes a while
    return openai.AsyncOpenAI(base_url=f"{address}/v1", http_client=http, **CLIENT)


class AgentApi(ABC):
    """One API. A request is what the chat client's `create` takes."""

    #: Kinds of answers (`tests/support/agents.py`) that cannot be asked for.
    lacks: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, address: str) -> None:
        """Of the session, without `/v1`."""
        self._client: Any = self._official(address)

    @staticmethod
    @abstractmethod
    def _official(address: str) -> openai.AsyncOpenAI | anthropic.AsyncAnthropic:
        """The API's own client."""

    async def close(self) -> None:
        await self._client.close()

    @abstractmethod
    async def answers(self, request: Mapping[str, Any], *, stream: bool) -> list[Message]:
        """The answers to a request, one for each choice."""

    @abstractmethod
    async def leave(self, request: Mapping[str, Any]) -> None:
        """Read the beginning of an answer, and go away."""


class ChatApi(AgentApi):
    """OpenAI's chat completions."""

    @staticmethod
    def _official(address: str) -> openai.AsyncOpenAI:
        return _openai(address)

    async def answers(self, request: Mapping[str, Any], *, stream: bool) -> list[Message]:
        if not stream:
            answer = await self._client.chat.completions.create(**request)
            return [choice.message.model_dump(exclude_none=True) for choice in answer.choices]
        messages: dict[int, dict[str, Any]] = {}
        async with await self._client.chat.completions.create(**request, stream=True) as chunks:
            async for chunk in chunks:
                for choice in chunk.choices:
                    message = messages.setdefault(choice.index, {"role": "assistant", "content": ""})
                    message["content"] += choice.delta.content or ""
                    for piece in choice.delta.tool_calls or ():
                        _take_call(message.setdefault("tool_calls", []), piece)
        return [message for _, message in sorted(messages.items())]

    async def leave(self, request: Mapping[str, Any]) -> None:
        async with await self._client.chat.completions.create(**request, stream=True) as stream:
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break


def _take_call(calls: list[dict[str, Any]], piece: Any) -> None:
    if piece.index == len(calls):
        calls.append(_call(piece.id, piece.function.name, ""))
    calls[piece.index]["function"]["arguments"] += piece.function.arguments or ""


class MessagesApi(AgentApi):
    """Anthropic's Messages."""

    lacks = frozenset({"two choices"})

    @staticmethod
    def _official(address: str) -> anthropic.AsyncAnthropic:
        http = anthropic.DefaultAsyncHttpxClient(verify=False)
        return anthropic.AsyncAnthropic(base_url=address, http_client=http, **CLIENT)

    async def answers(self, request: Mapping[str, Any], *, stream: bool) -> list[Message]:
        if stream:
            async with self._client.messages.stream(**self._request(request)) as events:
                answer = await events.get_final_message()
        else:
            answer = await self._client.messages.create(**self._request(request))
        blocks = [block.to_dict() for block in answer.content]
        calls = [
            _call(block["id"], block["name"], json.dumps(block["input"]))
            for block in blocks
            if block["type"] == "tool_use"
        ]
        return [_answer("".join(block.get("text", "") for block in blocks), calls, blocks)]

    async def leave(self, request: Mapping[str, Any]) -> None:
        async with self._client.messages.stream(**self._request(request)) as events:
            async for event in events:
                if event.type == "text":
                    break

    def _request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        system, messages = _apart(request["messages"])
        more = dict(request.get("extra_body", {}))
        if "logit_bias" in request:
            more["logit_bias"] = request["logit_bias"]
        functions = [tool["function"] for tool in request.get("tools", ())]
        return {
            "model": request["model"],
            "max_tokens": request["max_tokens"],
            **({"system": system} if system is not None else {}),
            "messages": [*self._messages(messages)],
            "tools": [
                {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]}
                for each in functions
            ],
            "stop_sequences": request.get("stop", []),
            "extra_headers": request["extra_headers"],
            "extra_body": more,
        }

    @staticmethod
    def _messages(messages: Sequence[Message]) -> Iterable[Message]:
        """Results of calls stand in one message of the user's."""
        for role, group in groupby(messages, key=lambda message: message["role"]):
            if role == "tool":
                results = [
                    {"type": "tool_result", "tool_use_id": each["tool_call_id"], "content": each["content"]}
                    for each in group
                ]
                yield {"role": "user", "content": results}
            else:
                yield from ({"role": role, "content": each.get("native", each["content"])} for each in group)


class ResponsesApi(AgentApi):
    """OpenAI's Responses. Half of the requests behind an answer name that one, and send what is new alone."""

    lacks = frozenset({"two choices", "stop string"})

    @staticmethod
    def _official(address: str) -> openai.AsyncOpenAI:
        return _openai(address)

    async def answers(self, request: Mapping[str, Any], *, stream: bool) -> list[Message]:
        if stream:
            response = None
            async for event in self._events(request):
                if event.type in ("response.completed", "response.incomplete"):
                    response = event.response
        else:
            response = await self._client.responses.create(**self._request(request))
        assert response is not None
        assert response.status in ("completed", "incomplete"), response
        items = [item.to_dict() for item in response.output]
        calls = [
            _call(item["call_id"], item["name"], item["arguments"]) for item in items if item["type"] == "function_call"
        ]
        return [_answer(response.output_text, calls, {"id": response.id, "items": items})]

    async def leave(self, request: Mapping[str, Any]) -> None:
        async with await self._client.responses.create(**self._request(request), stream=True) as events:
            async for event in events:
                if event.type == "response.output_text.delta":
                    break

    async def _events(self, request: Mapping[str, Any]) -> AsyncIterator[Any]:
        async with await self._client.responses.create(**self._request(request), stream=True) as events:
            async for event in events:
                yield event

    def _request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        system, messages = _apart(request["messages"])
        more = dict(request.get("extra_body", {}))
        if "logit_bias" in request:
            more["logit_bias"] = request["logit_bias"]
        before, messages = self._before(messages)
        return {
            "model": request["model"],
            "max_output_tokens": request["max_tokens"],
            "instructions": system,
            "input": [item for message in messages for item in self._items(message)],
            "tools": [{"type": "function", **tool["function"]} for tool in request.get("tools", ())],
            **before,
            "extra_headers": request["extra_headers"],
            "extra_body": more,
        }

    @staticmethod
    def _before(messages: Sequence[Message]) -> tuple[dict[str, Any], Sequence[Message]]:
        """The response that a request goes on from, where it names one, and what it says itself."""
        answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers or len(answers) % 2 or "native" not in messages[answers[-1]]:
            return {}, messages
        return {"previous_response_id": messages[answers[-1]]["native"]["id"]}, messages[answers[-1] + 1 :]

    @staticmethod
    def _items(message: Message) -> Iterable[Mapping[str, Any]]:
        if "native" in message:
            return list(message["native"]["items"])
        if message["role"] == "tool":
            return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}]
        return [{"role": message["role"], "content": message["content"]}]


APIS: Mapping[str, type[AgentApi]] = {"chat": ChatApi, "messages": MessagesApi, "responses": ResponsesApi}


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _answer(text: str, calls: Sequence[Mapping[str, Any]], native: Any) -> Message:
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {}), "native": native}


def _apart(messages: Sequence[Message]) -> tuple[str | None, Sequence[Message]]:
    """What the system says in front of a conversation."""
    if messages[0]["role"] == "system":
        return str(messages[0]["content"]), messages[1:]
    return None, messages
