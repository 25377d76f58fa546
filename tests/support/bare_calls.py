"""Streams of an engine that shows fewer tool calls than it sampled."""

from __future__ import annotations

from typing import Any

from tests.support.scripted_chat import delta, event, finish_event, streamed
from tests.support.scripted_worker import ScriptedWorker
from tests.support.session_trial import IM_END, SessionTrial, qwen3, session_trial
from tests.support.stage import Stage
from tests.support.tokenizers import tokenizer_directory

DONE = b"data: [DONE]\n\n"
#: What they are called.
NAMES = ("get_time", "get_date")
BARE = '<tool_call>\n{"name": "get_time"}\n</tool_call>'
NULL = '<tool_call>\n{"name": "get_time", "arguments": null}\n</tool_call>'
DATED = '<tool_call>\n{"name": "get_date", "arguments": {"zone": "UTC"}}\n</tool_call>'
UNKNOWN = '<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call>'


def named(name: str, arguments: str = "", index: int = 0) -> bytes:
    function = {"name": name, "arguments": arguments}
    call = {"id": f"call_{name}", "index": index, "type": "function", "function": function}
    return event([{**delta(None, 0), "delta": {"tool_calls": [call]}}])


def grown(arguments: str) -> bytes:
    call = {"id": None, "index": 0, "type": "function", "function": {"name": None, "arguments": arguments}}
    return event([{**delta(None, 0), "delta": {"tool_calls": [call]}}])


def lossy(text: str, *shown: bytes, finish: str = "tool_calls", root: bool = True) -> Any:
    """A stream of an engine that sampled a text and has shown so much of its calls. `root`: it tells its prompt."""
    ids = [*qwen3().encode(text), IM_END]
    begun = event([{**delta("", 0), "delta": {"role": "assistant", "content": ""}}])
    told = event([delta(None, len(ids))])
    prompt = {"input_ids": [1, 2, 3]} if root else {}
    extra = event([], sglext={**prompt, "output_ids": [ids]})
    return streamed(begun, told, *shown, finish_event(finish), extra, DONE)


async def a_trial(stage: Stage, worker: ScriptedWorker) -> SessionTrial:
    return await session_trial(stage, worker, hf_checkpoint=tokenizer_directory("qwen3"))
