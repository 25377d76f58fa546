"""Bodies with one field, or the whole of them, as no client should send it: every known field of every known route,
with every odd value."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from miles_router.engines.paths import CHAT, COMPLETIONS, GENERATE

MARK = "@odd@"
#: Deeper than JSON can be written again here, and deeper than a stack.
DEEP, BOTTOMLESS = 300, 100_000
#: JSON, or what looks like it.
VALUES = (
    "null",
    "true",
    "0",
    "-1",
    "1.5",
    "2147483648",
    "18446744073709551616",
    "1e400",
    "1" + "0" * 400,
    "NaN",
    "Infinity",
    '""',
    '"x"',
    r'"\ud800"',
    '"\xed\xa0\x80"',  # a surrogate in UTF-8, byte by byte
    r'"\u0000\u202e"',
    "[]",
    "{}",
    "[null]",
    "[[]]",
    "[{}]",
    '["x"]',
    "[-1]",
    "[2147483648]",
    "[1.5]",
    "[true]",
    "[0, [0]]",
    '{"a": 1, "a": []}',
    '{"n": [1], "type": [], "function": [], "text": []}',
    "[" * DEEP + "]" * DEEP,
    '{"a":' * DEEP + "1" + "}" * DEEP,
    "[" * BOTTOMLESS + "]" * BOTTOMLESS,
)


#: Fields that say how much work it is, and values with which a worker would just begin it.
WORK = frozenset({"n", "max_new_tokens", "max_tokens"})
ENDLESS = frozenset({"null", "2147483648", "18446744073709551616", "1" + "0" * 400})


@dataclass(frozen=True)
class Entrance:
    """A route and a good body for it, each of whose fields may be odd."""

    path: str
    body: Any
    fields: tuple[tuple[Any, ...], ...]  # paths within the body; (): the whole
    headers: Mapping[str, str] = field(default_factory=dict)
    method: str = "POST"

    def bodies(self) -> Iterator[tuple[str, bytes]]:
        """Each odd body, and what is odd about it."""
        for place in ((), *self.fields):
            for value in VALUES:
                if self.is_work(place) and value in ENDLESS:
                    continue
                yield f"{'.'.join(map(str, place)) or 'body'} = {value[:40]}", self.with_odd({place: value})

    @staticmethod
    def is_work(place: tuple[Any, ...]) -> bool:
        """Whether a field says how much a worker is to do."""
        return bool(place) and place[-1] in WORK

    def with_odd(self, odd: Mapping[tuple[Any, ...], str]) -> bytes:
        """The body with these fields replaced; those within another that is replaced are lost."""
        body = copy.deepcopy(self.body)
        for number, place in enumerate(odd):
            body = _replaced(body, place, f"{MARK}{number}{MARK}")
        text = json.dumps(body)
        for number, value in enumerate(odd.values()):
            text = text.replace(f'"{MARK}{number}{MARK}"', value)
        return text.encode("latin-1")


def _replaced(body: Any, place: tuple[Any, ...], value: str) -> Any:
    if not place:
        return value
    holder = body
    for step in place[:-1]:
        if not isinstance(holder, dict | list):
            return body
        holder = holder[step]
    if isinstance(holder, dict | list):
        holder[place[-1]] = value
    return body


def _names(*names: str, within: tuple[Any, ...] = ()) -> tuple[tuple[Any, ...], ...]:
    return tuple((*within, name) for name in names)


_PARAMS = ("n", "max_new_tokens", "stop", "stop_token_ids", "skip_special_tokens", "no_stop_trim", "ignore_eos")
_OF_GENERATE = (
    *_names("text", "input_ids", "input_tokens", "sampling_params", "rid", "stream", "return_logprob"),
    *_names("logprob_start_len", "token_ids_logprob", "image_data", "session_params"),
    *_names("return_routed_experts", "routed_experts_start_len", "return_indexer_topk", "extra_key"),
    *_names(*_PARAMS, within=("sampling_params",)),
)
_CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
_TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}
_ASKED = {"role": "assistant", "content": "Wait", "tool_calls": [_CALL]}
_CHAT: dict[str, Any] = {
    "model": "m",
    "max_tokens": 2,
    "tools": [_TOOL],
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        _ASKED,
        {"role": "tool", "tool_call_id": "call_1", "content": "42"},
    ],
}
_OF_CHAT = (
    *_names("messages", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort", "reasoning", "n", "stream"),
    *_names("stream_options", "logprobs", "input_ids", "continue_final_message", "stop"),
    *_names(
        "rid", "return_input_ids_in_sglext", "return_meta_info", "return_routed_experts", "return_indexer_topk", "model"
    ),
    *_names("reasoning", "effort"),
    ("messages", 0),
    *_names("role", "content", within=("messages", 0)),
    ("messages", 0, "content", 0),
    *_names("type", "text", within=("messages", 0, "content", 0)),
    *_names("role", "content", "reasoning_content", "tool_calls", within=("messages", 1)),
    ("messages", 1, "tool_calls", 0),
    *_names("id", "type", "function", within=("messages", 1, "tool_calls", 0)),
    *_names("name", "arguments", within=("messages", 1, "tool_calls", 0, "function")),
    *_names("role", "content", "tool_call_id", "name", within=("messages", 2)),
    ("tools", 0),
    *_names("type", "function", within=("tools", 0)),
    *_names("name", "parameters", "description", within=("tools", 0, "function")),
)
HELD, DONE, TEXT = "held", "done", "Once upon a time"
#: What the session `HELD` has recorded; the answer is put behind it by whoever has it.
HISTORY = [{"role": "user", "content": "Hi"}]


def behind(answer: Mapping[str, Any]) -> dict[str, Any]:
    """A chat request that goes on from the recorded turn."""
    appended = [_ASKED, {"role": "tool", "tool_call_id": "call_1", "content": "42"}]
    return {"model": "m", "max_tokens": 2, "messages": [*HISTORY, answer, *appended]}


def entrances(answer: Mapping[str, Any]) -> list[Entrance]:
    """All of them; `answer` is the message that the session `HELD` has recorded."""
    next_turn = behind(answer)
    of_next = (
        *_names("messages", "tools", "chat_template_kwargs", "input_ids", "n", "stream"),
        ("messages", 1),
        *_names("role", "content", "tool_calls", "reasoning_content", within=("messages", 1)),
        ("messages", 2),
        *_names("role", "content", "tool_calls", within=("messages", 2)),
        ("messages", 2, "tool_calls", 0, "function", "arguments"),
        ("messages", 3),
        *_names("role", "content", "tool_call_id", within=("messages", 3)),
    )
    params = {"max_new_tokens": 2}
    in_session = f"/sessions/{HELD}"
    completion = {"model": "m", "max_tokens": 2, "prompt": "Hi"}
    of_completions = _names("prompt", "n", "stream", "echo", "return_token_ids", "rid")
    return [
        Entrance(GENERATE, {"text": "Hi", "sampling_params": params}, _OF_GENERATE),
        Entrance(GENERATE, {"text": "Hi", "sampling_params": params, "stream": True}, _OF_GENERATE),
        Entrance(
            GENERATE,
            {"input_ids": [[5, 6], [7]], "sampling_params": [params, params], "rid": ["a", "b"]},
            (*_OF_GENERATE[:6], ("input_ids", 0), ("input_ids", 0, 1), ("sampling_params", 1, "n"), ("rid", 1)),
        ),
        Entrance(CHAT, _CHAT, _OF_CHAT),
        Entrance(CHAT, _CHAT, _OF_CHAT, {"X-Session-Id": "by-header", "X-Turn-Id": "t"}),
        Entrance(in_session + CHAT, _CHAT, _OF_CHAT),
        Entrance(in_session + CHAT, {**_CHAT, "stream": True}, _OF_CHAT),
        Entrance(in_session + CHAT, next_turn, of_next),
        Entrance(in_session + COMPLETIONS, completion, of_completions),
        Entrance(in_session + COMPLETIONS, {**completion, "prompt": [[5, 6], [7]]}, (("prompt", 0), ("prompt", 0, 1))),
        Entrance("/sessions", {"metadata": {"a": 1}}, (*_names("session_id", "metadata"), ("metadata", "a"))),
        Entrance(
            f"{in_session}/samples",
            {},
            _names("format", "max_seq_len", "branches", "per_token", "reward", "label", "metadata", "unknown"),
        ),
        Entrance(
            f"{in_session}/rewards",
            {"turn": 0, "span": [0, 1], "name": "advantage", "value": 0.5},
            (*_names("turn", "segment", "span", "name", "value", "reward", "unknown"), ("span", 0)),
        ),
        Entrance("/retrieve_from_text", {"text": TEXT}, _names("text", "rid", "strict", "return_logp", "unknown")),
        Entrance("/retrieve_from_text", {"texts": [TEXT]}, (*_names("text", "texts"), ("texts", 0))),
        Entrance("/routed_experts", {"session_id": HELD}, _names("session_id", "leaf", "format", "start", "stop")),
        Entrance("/routed_experts", {"text": TEXT}, _names("text", "rid", "session_id", "format")),
        Entrance("/routed_experts", {"rid": "r"}, _names("rid")),
        Entrance(
            "/session/finalize",
            {"session_id": DONE},
            _names("session_id", "trajectory_id", "instance_id", "label", "reward"),
        ),
        Entrance("/session/discard", {"session_id": "nobody"}, _names("session_id", "trajectory_id")),
        Entrance(
            "/trajectory/read",
            {},
            _names("session_id", "trajectory_id", "instance_id", "max_groups", "drain", "segment_view"),
        ),
        Entrance("/v1/rollout/resume", {}, _names("version")),
        Entrance("/v1/rollout/pause", {}, _names("mode")),
        Entrance("/pause_generation", {}, _names("mode")),
        Entrance("/update_weight_version", {"new_version": "1"}, _names("new_version", "abort_all_requests")),
        Entrance("/abort_request", {"rid": "none"}, _names("rid", "abort_all")),
        Entrance(
            "/add_worker", {"url": "http://127.0.0.1:1"}, _names("url", "api_key", "worker_type", "labels", "priority")
        ),
        Entrance("/remove_worker", {"url": "http://127.0.0.1:1"}, _names("url", "drain")),
    ]
