"""Streams of an engine that shows fewer tool calls than it sampled, and what agents of three APIs see and send back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tests.support.http import RawReply
from tests.support.scripted_chat import delta, event, finish_event, streamed
from tests.support.scripted_worker import Behaviour, ScriptedWorker, Visit
from tests.support.session_trial import CHAT, IM_END, SessionTrial, chunks_of, qwen3, session_trial
from tests.support.stage import Stage
from tests.support.tokenizers import tokenizer_directory

DONE = b"data: [DONE]\n\n"
NAMES = ("get_time", "get_date")
BARE = '<tool_call>\n{"name": "get_time"}\n</tool_call>'
NULL = '<tool_call>\n{"name": "get_time", "arguments": null}\n</tool_call>'
DATED = '<tool_call>\n{"name": "get_date", "arguments": {"zone": "UTC"}}\n</tool_call>'
UNKNOWN = '<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"zone": {"type": "string"}}}
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


def tools(path: str) -> list[Any]:
    """Both functions, as an API takes them."""
    if path == MESSAGES:
        return [{"name": name, "input_schema": PARAMETERS} for name in NAMES]
    functions = [{"name": name, "parameters": PARAMETERS} for name in NAMES]
    if path == RESPONSES:
        return [{"type": "function", **each} for each in functions]
    return [{"type": "function", "function": each} for each in functions]


def request(path: str, items: Sequence[Any], *, stream: bool = True) -> dict[str, Any]:
    """A request of an API with this history."""
    named = {"input": items} if path == RESPONSES else {"messages": items, "max_tokens": 64}
    return {"model": "m", "stream": stream, "tools": tools(path), **named}


def events(reply: RawReply) -> list[Any]:
    assert reply.status == 200, reply.body
    lines = [line for line in reply.body.split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


def seen_calls(path: str, reply: RawReply) -> list[tuple[str, str, str]]:
    """Id, name and arguments of each call that a stream shows, put together as its official client does."""
    calls: dict[int, list[str]] = {}
    for each in events(reply):
        if path == CHAT:
            for piece in (piece for choice in each["choices"] for piece in choice["delta"].get("tool_calls") or ()):
                one = calls.setdefault(piece["index"], ["", "", ""])
                said = (piece.get("id"), piece["function"].get("name"), piece["function"].get("arguments"))
                one[:] = [before + (new or "") for before, new in zip(one, said, strict=True)]
        elif path == MESSAGES and each.get("content_block", {}).get("type") == "tool_use":
            calls[each["index"]] = [each["content_block"]["id"], each["content_block"]["name"], ""]
        elif path == MESSAGES and each.get("delta", {}).get("type") == "input_json_delta":
            calls[each["index"]][2] += each["delta"]["partial_json"]
        elif path == RESPONSES and each["type"] == "response.output_item.done" and "call_id" in each["item"]:
            calls[each["output_index"]] = [each["item"][name] for name in ("call_id", "name", "arguments")]
    return [(call_id, name, arguments) for call_id, name, arguments in calls.values()]


def end_of(path: str, reply: RawReply) -> str:
    """Why a stream ended."""
    if path == CHAT:
        choices = [choice for chunk in chunks_of(reply.body) for choice in chunk["choices"]]
        return str(next(each["finish_reason"] for each in choices if each["finish_reason"]))
    last = events(reply)[-2 if path == MESSAGES else -1]
    return str(last["delta"]["stop_reason"] if path == MESSAGES else last["response"]["status"])


ENDS = {CHAT: "tool_calls", MESSAGES: "tool_use", RESPONSES: "completed"}


def history(path: str, calls: Sequence[tuple[str, str]], arguments: Any) -> list[Any]:
    """The question, calls that came back, the first with these arguments (a missing one is `...`), and results."""
    began: list[Any] = [{"role": "user", "content": "When?"}]
    given = [arguments, *['{"zone": "UTC"}'] * (len(calls) - 1)]
    if path == CHAT:
        made = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": each}}
            for (call_id, name), each in zip(calls, given, strict=True)
        ]
        if arguments is ...:
            del made[0]["function"]["arguments"]  # type: ignore[attr-defined]
        results = [{"role": "tool", "tool_call_id": call_id, "content": "now"} for call_id, _ in calls]
        return [*began, {"role": "assistant", "content": "", "tool_calls": made}, *results]
    if path == RESPONSES:
        items: list[Any] = [
            {"type": "function_call", "call_id": call_id, "name": name, "arguments": each}
            for (call_id, name), each in zip(calls, given, strict=True)
        ]
        if arguments is ...:
            del items[0]["arguments"]
        return [
            *began,
            *items,
            *({"type": "function_call_output", "call_id": call_id, "output": "now"} for call_id, _ in calls),
        ]
    inputs = [{}, *[{"zone": "UTC"}] * (len(calls) - 1)]
    blocks = [
        {"type": "tool_use", "id": call_id, "name": name, "input": each}
        for (call_id, name), each in zip(calls, inputs, strict=True)
    ]
    results = [{"type": "tool_result", "tool_use_id": call_id, "content": "now"} for call_id, _ in calls]
    return [*began, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]


def returned(path: str, call_id: str, arguments: Any, *, name: str = "get_date") -> list[Any]:
    """The history with the call as an agent has repaired it, and its result."""
    question: Any = {"role": "user", "content": "When?"}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    if path == MESSAGES:
        given = {"INVALID_JSON": arguments} if isinstance(arguments, str) else arguments
        call = {"type": "tool_use", "id": call_id, "name": name, "input": given}
        result = {"type": "tool_result", "tool_use_id": call_id, "content": "now"}
        return [question, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    if path == RESPONSES:
        item = {"type": "function_call", "call_id": call_id, "name": name, "arguments": text}
        return [question, item, {"type": "function_call_output", "call_id": call_id, "output": "now"}]
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}
    return [
        question,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": "now"},
    ]


def named(name: str, arguments: str = "", index: int = 0) -> bytes:
    """The event in which the engine names a call."""
    function = {"name": name, "arguments": arguments}
    call = {"id": f"call_{name}", "index": index, "type": "function", "function": function}
    return event([{**delta(None, 0), "delta": {"tool_calls": [call]}}])


def grown(arguments: str, index: int = 0) -> bytes:
    """An event with more arguments of a call."""
    call = {"id": None, "index": index, "type": "function", "function": {"name": None, "arguments": arguments}}
    return event([{**delta(None, 0), "delta": {"tool_calls": [call]}}])


def lossy(text: str, *shown: bytes, finish: str = "tool_calls", root: bool = True) -> Any:
    """A stream of an engine that sampled a text and has shown so much of its calls. `root`: it tells its prompt."""
    ids = [*qwen3().encode(text), IM_END]
    begun = event([{**delta("", 0), "delta": {"role": "assistant", "content": ""}}])
    told = event([delta(None, len(ids))])
    prompt = {"input_ids": [1, 2, 3]} if root else {}
    extra = event([], sglext={**prompt, "output_ids": [ids]})
    return streamed(begun, told, *shown, finish_event(finish), extra, DONE)


def says(text: str) -> Behaviour:
    """A stream of a text without calls, which tells its prompt where it is asked for that."""

    async def answer(visit: Visit) -> None:
        root = "return_input_ids_in_sglext" in json.loads(await visit.read_body())
        await lossy(text, event([delta(text, 0)]), finish="stop", root=root)(visit)

    return answer


async def a_trial(stage: Stage, worker: ScriptedWorker) -> SessionTrial:
    return await session_trial(stage, worker, hf_checkpoint=tokenizer_directory("qwen3"))


async def ask(trial: SessionTrial, session: str, path: str, items: Sequence[Any]) -> RawReply:
    return await trial.ask("POST", f"/sessions/{session}{path}", request(path, items))
