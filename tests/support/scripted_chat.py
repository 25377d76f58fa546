"""Chat answers of an engine, byte by byte, for `ScriptedWorker`.

able(worker).always(script(chat_reply([7, 8], "Hi")))
able(worker).always(streamed(*chat_events([7, 8], ["H", "i"])))
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from tests.support.scripted_worker import (
    LAST_CHUNK,
    Behaviour,
    ScriptedWorker,
    Visit,
    chunk,
    chunked_head,
    reply,
    script,
)

JSON = [("Content-Type", "application/json")]
EVENT_STREAM = [("Content-Type", "text/event-stream; charset=utf-8")]
DONE = b"data: [DONE]\n\n"
IDS_FIELD = "return_output_ids_in_sglext"
PROMPT = [1, 2, 3]


def able(worker: ScriptedWorker, *fields: str, parser: str | None = "qwen25") -> ScriptedWorker:
    """A worker that says which fields of chat requests it knows, and its parser of tool calls; by default one whose
    streams can be recorded."""
    known: dict[str, object] = {name: {} for name in fields or ("messages", IDS_FIELD)}
    schema = {"paths": {}, "components": {"schemas": {"ChatCompletionRequest": {"properties": known}}}}
    worker.standing["/openapi.json"] = script(reply(json.dumps(schema).encode(), headers=JSON))
    server_info = {"tool_call_parser": parser, "reasoning_parser": None}
    worker.standing["/server_info"] = script(reply(json.dumps(server_info).encode(), headers=JSON))
    return worker


def meta_of(ids: Sequence[int], **fields: Any) -> dict[str, Any]:
    return {
        "id": "r1",
        "finish_reason": {"type": "length", "length": len(ids)},
        "completion_tokens": len(ids),
        "cached_tokens": 0,
        "output_token_logprobs": [[-0.5, token, None] for token in ids],
        "weight_versions": [{"version": "1", "start": 0, "end": len(ids)}],
        **fields,
    }


def chat_answer(ids: Sequence[int], text: str = "ok", **choice: Any) -> dict[str, Any]:
    """A whole answer with everything that recording asks for; `choice` replaces fields of its only choice."""
    only = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "logprobs": {"content": []},
        "finish_reason": "length",
        "matched_stop": None,
        "prompt_token_ids": PROMPT,
        "meta_info": meta_of(ids),
        **choice,
    }
    head = {"id": "r1", "object": "chat.completion", "created": 1, "model": "m"}
    answer = {**head, "choices": [only]}
    if only["prompt_token_ids"] is None:  # the script does not know how many ids it was given
        return {**answer, "usage": {"completion_tokens": len(ids)}}
    prompt = len(only["prompt_token_ids"])
    return {
        **answer,
        "usage": {"prompt_tokens": prompt, "completion_tokens": len(ids), "total_tokens": prompt + len(ids)},
    }


def chat_reply(ids: Sequence[int], text: str = "ok", **choice: Any) -> bytes:
    return reply(json.dumps(chat_answer(ids, text, **choice)).encode(), headers=JSON)


def event(choices: Sequence[Any], **fields: Any) -> bytes:
    head = {"id": "r1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return b"data: " + json.dumps({**head, "choices": choices, **fields}).encode() + b"\n\n"


def delta(text: str | None, tokens: int = 1, *, index: int = 0, **fields: Any) -> dict[str, Any]:
    """A choice of a chunk: text, and so many logprobs."""
    content = [{"token": "", "bytes": [], "logprob": -0.5, "top_logprobs": []}] * tokens
    return {
        "index": index,
        "delta": {"content": text},
        "logprobs": {"content": content} if tokens else None,
        "finish_reason": None,
        "matched_stop": None,
        **fields,
    }


def finish_event(reason: str) -> bytes:
    return event([{**delta(None, 0), "delta": {}, "finish_reason": reason}])


def chat_events(ids: Sequence[int], texts: Sequence[str], **sglext: Any) -> list[bytes]:
    """The events of a stream that can be recorded: the role, a text with a logprob for each id, the finish reason, the
    ids, `[DONE]`. A field of `sglext` that is None is left out."""
    extra = {"input_ids": PROMPT, "output_ids": [list(ids)], **sglext}
    told = {name: value for name, value in extra.items() if value is not None}
    return [
        event([{**delta("", 0), "delta": {"role": "assistant", "content": ""}}]),
        *(event([delta(text)]) for text in texts),
        finish_event("length"),
        *([event([], sglext=told)] if told else []),
        DONE,
    ]


def streamed(*events: bytes | asyncio.Event) -> Behaviour:
    """A stream of events; it waits where it meets an `asyncio.Event`."""
    steps = [chunk(each) if isinstance(each, bytes) else each for each in events]
    return script(chunked_head(EVENT_STREAM), *steps, LAST_CHUNK)


def answering(ids: Sequence[int], text: str = "ok", *, calls: Sequence[Any] = (), **fields: Any) -> Behaviour:
    """An answer in the form in which it is asked for: whole or streamed, with the prompt's ids unless it was given ids.
    `fields` of its message."""
    message: dict[str, Any] = {"role": "assistant", "content": None if calls else text, **fields}
    if calls:
        message["tool_calls"] = calls
    finish = "tool_calls" if calls else "stop"

    async def answer(visit: Visit) -> None:
        asked = json.loads(await visit.read_body())
        prompt = None if "input_ids" in asked else PROMPT
        if not asked.get("stream"):
            return await script(chat_reply(ids, message=message, finish_reason=finish, prompt_token_ids=prompt))(visit)
        role, *_, extra, done = chat_events(ids, [], input_ids=prompt)
        said = event([{**delta(None, len(ids)), "delta": message}])
        return await streamed(role, said, finish_event(finish), extra, done)(visit)

    return answer


def failed_stream(message: str) -> Behaviour:
    """A stream that begins with `Hel`, and ends with an error of the engine's."""
    begun, said, *_ = chat_events([7], ["Hel"])
    error = json.dumps({"error": {"message": message, "code": 500}}).encode()
    return streamed(begun, said, b"data: %b\n\n" % error, DONE)


def cut_answer(*, stream: bool) -> Behaviour:
    *begun, _, ids, done = chat_events([7], ["Hel"])
    if stream:
        return streamed(*begun, finish_event("abort"), ids, done)
    return script(chat_reply([7], "Hel", finish_reason="abort"))
