"""Chat messages as items: the output of a response, and its input.

An item's id contains the id of its response and its position there, so a returned item names its response.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from middleware_hub.openai_session.agent_apis.open_calls import open_arguments
from middleware_hub.openai_session.agent_apis.responses.forms import CUSTOM, FUNCTION
from middleware_hub.openai_session.agent_apis.responses.tools import ResponsesTools
from middleware_hub.openai_session.sessions.messages import Message

RESPONSE = "resp_"
ITEM = re.compile(r"[a-z]+_([0-9a-f]{32})_(i?)\d+")
#: The prefix of an item's id, by the type of the item.
PREFIXES: Mapping[str, str] = {
    "reasoning": "rs",
    "message": "msg",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "local_shell_call": "lsh",
    "shell_call": "sh",
    "apply_patch_call": "apc",
    "function_call_output": "fco",
    "custom_tool_call_output": "cto",
}
#: The prefix of `encrypted_content`. It contains the response's id, from which only this session knows the reasoning.
SEALED = "miles1."


def response_of(item_id: object, *, output: bool = True) -> str | None:
    """Return the id of the response that an item id names; None for a foreign id.

    Args:
        output: accept only items of the response's output, not of its input.
    """
    found = ITEM.fullmatch(item_id) if isinstance(item_id, str) else None
    return f"{RESPONSE}{found[1]}" if found is not None and not (output and found[2]) else None


def sealed(response_id: str) -> str:
    """Return the `encrypted_content` that stands for the reasoning of a response."""
    return SEALED + response_id


class ItemWriter:
    """A writer of the items of one response.

    Args:
        seals: whether reasoning items also have `encrypted_content`.
    """

    def __init__(self, response_id: str, tools: ResponsesTools, *, seals: bool) -> None:
        self._response_id = response_id
        self._key = response_id[len(RESPONSE) :]
        self._tools = tools
        self._seals = seals

    def id(self, prefix: str, place: int) -> str:
        """Return the id of the item at this position of the output."""
        return f"{prefix}_{self._key}_{place}"

    def reasoning(self, item_id: str, text: str | None, status: str = "completed") -> dict[str, Any]:
        """Return a reasoning item; with `text` None, an item that has just begun."""
        item: dict[str, Any] = {"type": "reasoning", "id": item_id, "summary": [], "content": [], "status": status}
        if text is not None:
            item["content"] = [{"type": "reasoning_text", "text": text}]
            if self._seals:
                item["encrypted_content"] = sealed(self._response_id)
        return item

    def message(self, item_id: str, text: str | None, status: str = "completed") -> dict[str, Any]:
        """Return a message item; with `text` None, an item that has just begun."""
        content = [] if text is None else [output_text(text)]
        return {"type": "message", "id": item_id, "role": "assistant", "status": status, "content": content}

    def call(self, call: Mapping[str, Any], place: int, status: str = "completed") -> dict[str, Any]:
        item = self._tools.call(call, "", status)
        return {**item, "id": self.id(PREFIXES[item["type"]], place)}

    def cut_call(self, call: Mapping[str, Any], item_id: str, arguments: str) -> dict[str, Any] | None:
        """Return the item of a call that was not sampled to its end, or None for kinds whose items cannot express
        that."""
        if self._tools.of(call["function"]["name"]).form is not FUNCTION:
            return None
        function = {**call["function"], "arguments": arguments}
        return self._tools.call({**call, "function": function}, item_id, "incomplete")

    def answer(self, message: Message, status: str, *, cut_call: bool = False) -> list[dict[str, Any]]:
        """Return the items of a complete answer.

        Args:
            status: the status of the last item.
            cut_call: the last item is a call that was not sampled to its end.
        """
        items: list[dict[str, Any]] = []
        thinking, text = message.get("reasoning_content"), message.get("content")
        calls = message.get("tool_calls") or ()
        says = bool(text and not text.isspace())
        if thinking:
            last = "completed" if says or calls else status
            items.append(self.reasoning(self.id("rs", 0), thinking, last))
        if says or not (thinking or calls):
            shown = text.rstrip() if calls and text else text or ""
            items.append(self.message(self.id("msg", len(items)), shown, "completed" if calls else status))
        for place, call in enumerate(calls, 1):
            if cut_call and place == len(calls):
                item_id = self.id(PREFIXES[FUNCTION.kind], len(items))
                cut = self.cut_call(call, item_id, open_arguments(call["function"].get("arguments") or ""))
                items += [cut] if cut is not None else []
            else:
                items.append(self.call(call, len(items)))
        return items


def output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def input_items(key: str, messages: Sequence[Message], tools: ResponsesTools) -> Iterator[dict[str, Any]]:
    """Yield chat messages as the items of a response's input. `key` is the response's id without its prefix."""
    kinds: dict[object, str] = {}
    place = 0
    for message in messages:
        for item in _items_of(message, tools, kinds):
            item["id"] = f"{PREFIXES.get(item['type'], 'msg')}_{key}_i{place}"
            place += 1
            yield item


def _items_of(message: Message, tools: ResponsesTools, kinds: dict[object, str]) -> Iterator[dict[str, Any]]:
    if message["role"] == "assistant":
        writer = ItemWriter(RESPONSE, tools, seals=False)
        for item in writer.answer(message, "completed"):
            kinds[item.get("call_id")] = item["type"]
            yield item
    elif message["role"] == "tool":
        call_id = message.get("tool_call_id")
        custom = kinds.get(call_id) == CUSTOM.kind
        kind = "custom_tool_call_output" if custom else "function_call_output"
        yield {"type": kind, "call_id": call_id, "output": text_of(message), "status": "completed"}
    else:
        content = [{"type": "input_text", "text": text_of(message)}]
        yield {"type": "message", "role": message["role"], "content": content, "status": "completed"}


def text_of(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return str(content or "")
