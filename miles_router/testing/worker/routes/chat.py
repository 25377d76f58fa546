"""The route `/v1/chat/completions`, whole and streamed."""

import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from aiohttp import web

from miles_router.testing.worker.model.reasoning import ReasoningStream, separated
from miles_router.testing.worker.model.tool_calls import ToolCallStream, parse_calls
from miles_router.testing.worker.routes.native import all_answers, all_events
from miles_router.testing.worker.routes.openai import serve
from miles_router.testing.worker.visit import Visit
from miles_router.testing.worker.wire.chat_request import ChatInput, parse_chat
from miles_router.testing.worker.wire.openai_parts import chat_logprobs, metadata_of, usage_of


async def chat_completions(visit: Visit) -> web.StreamResponse:
    """Handle POST /v1/chat/completions."""
    return await serve(visit, parse_chat, chat_answer, chat_chunks)


async def chat_answer(visit: Visit, chat: ChatInput) -> dict[str, Any]:
    """Return the whole answer."""
    answers = await all_answers(visit, chat.given)
    first = answers[0]["meta_info"]
    response: dict[str, Any] = {
        "id": first["id"],
        "object": "chat.completion",
        "created": int(time.time()),
        "model": chat.model,
        "choices": [_choice(visit, chat, index, answer) for index, answer in enumerate(answers)],
        "usage": usage_of([answer["meta_info"] for answer in answers], chat.copies),
        "metadata": metadata_of(first),
    }
    sglext = _sglext(chat, dict(enumerate(answers)), whole=True)
    # With `return_meta_info`, the whole answer has the expert rows in `meta_info` already.
    if chat.asks("return_meta_info"):
        sglext.pop("routed_experts", None)
    return {**response, "sglext": sglext} if sglext.keys() - {"spec_tokens_details"} else response


def _choice(visit: Visit, chat: ChatInput, index: int, answer: dict[str, Any]) -> dict[str, Any]:
    meta = answer["meta_info"]
    text, reasoning, calls = answer["text"], None, None
    if chat.separates_reasoning:
        reasoning, text = separated(text, thinking=chat.thinking)
    if chat.parses_tools:
        text, calls = parse_calls(text, chat.tool_names)
    finish = meta["finish_reason"]
    if calls and finish["type"] == "stop":
        # In SGLang this dictionary is shared with `meta_info`, which changes too.
        finish.update(type="tool_calls", matched=None)
    message: dict[str, Any] = {"role": "assistant", "content": text, "reasoning_content": reasoning or None}
    if calls:
        message["tool_calls"] = calls
    choice = {
        "index": index,
        "message": message,
        "logprobs": _logprobs(visit, meta, 0) if chat.asks("logprobs") else None,
        "finish_reason": finish["type"],
        "matched_stop": finish.get("matched"),
    }
    if chat.asks("return_prompt_token_ids") or chat.asks("return_token_ids"):
        choice["prompt_token_ids"] = answer["prompt_token_ids"]
    if chat.asks("return_token_ids"):
        choice["response_token_ids"] = answer["output_ids"]
    if chat.asks("return_meta_info"):
        choice["meta_info"] = meta
    return choice


def _logprobs(visit: Visit, meta: dict[str, Any], start: int) -> dict[str, Any]:
    triples, tops = meta["output_token_logprobs"], meta.get("output_top_logprobs", [])
    return chat_logprobs(visit.engine.model.tokenizer, triples[start:], tops[start:])


def _sglext(chat: ChatInput, answers: dict[int, dict[str, Any]], *, whole: bool) -> dict[str, Any]:
    """Return the `sglext` fields of the answer in the order of SGLang's schema; empty if none was requested."""
    first = next(iter(answers.values()))
    extra: dict[str, Any] = {}
    if chat.asks("return_routed_experts") and "routed_experts" in first["meta_info"]:
        extra["routed_experts"] = first["meta_info"]["routed_experts"]
    cached = first["meta_info"].get("cached_tokens_details")
    if chat.asks("return_cached_tokens_details") and cached is not None:
        extra["cached_tokens_details"] = cached
    if whole and chat.copies > 1:
        extra["spec_tokens_details"] = []
    if chat.asks("return_input_ids_in_sglext"):
        extra["input_ids"] = first["prompt_token_ids"]
    if chat.asks("return_output_ids_in_sglext"):
        extra["output_ids"] = [answers[index]["output_ids"] for index in range(chat.copies) if index in answers]
    return extra


async def chat_chunks(visit: Visit, chat: ChatInput) -> AsyncIterator[dict[str, Any]]:
    """Yield the stream's chunks, without `[DONE]`."""
    writer = _ChunkWriter(visit, chat)
    async for event in all_events(visit, chat.given):
        for chunk in writer.chunks(event):
            yield chunk
    for chunk in writer.last_chunks():
        yield chunk


_EMPTY_DELTA = {"role": None, "content": None, "reasoning_content": None}


def _lets_go(event: dict[str, Any]) -> bool:
    """Return True if parsers must release held-back text: at the end of an answer, unless it was aborted."""
    return bool((event["meta_info"]["finish_reason"] or {"type": "abort"})["type"] != "abort")


class _ChunkWriter:
    """A converter from the engine's events to chat chunks. It tracks what was sent of each choice."""

    def __init__(self, visit: Visit, chat: ChatInput) -> None:
        self._visit = visit
        self._chat = chat
        self._created = int(time.time())
        self._latest: dict[int, dict[str, Any]] = {}
        self._ids: dict[int, list[int]] = {}
        self._sent_text: dict[int, int] = {}
        self._sent_logprobs: dict[int, int] = {}
        self._reasoning: dict[int, ReasoningStream] = {}
        self._tools: dict[int, ToolCallStream] = {}
        self._rid = ""

    def chunks(self, event: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the chunks of one event: the role first, then reasoning, text and tool calls. The first chunk with
        content carries the logprobs."""
        index = event.get("index", 0)
        self._rid = event["meta_info"]["id"]
        if index not in self._latest:
            yield self._delta(index, {"reasoning_content": None, "role": "assistant", "content": ""})
        self._remember(index, event)
        logprobs = self._new_logprobs(index, event)
        usage = {"usage": usage_of([event["meta_info"]], 1)} if self._option("continuous_usage_stats") else {}
        reasoning, text = self._new_text(index, event)
        if reasoning:
            yield {**self._delta(index, {"reasoning_content": reasoning}, logprobs), **usage}
            logprobs = None
        for part in self._parts(index, text, event):
            if not isinstance(part, str):
                yield {**self._delta(index, {**_EMPTY_DELTA, "tool_calls": [part]}), "usage": None, **usage}
            elif self._chat.parses_tools:
                yield {**self._delta(index, {**_EMPTY_DELTA, "content": part}), "usage": None, **usage}
            else:
                yield {**self._delta(index, {"reasoning_content": None, "content": part}, logprobs), **usage}
                logprobs = None
        # Without any parser SGLang drops the logprobs of a step that produces no text.
        if logprobs is not None and self._visit.settings.has_parser:
            yield {**self._delta(index, {"reasoning_content": None}, logprobs), **usage}

    def last_chunks(self) -> Iterator[dict[str, Any]]:
        """Yield the chunks with finish reasons, then `sglext`, then usage."""
        for index, event in self._latest.items():
            finish = event["meta_info"]["finish_reason"]
            called = index in self._tools and self._tools[index].calls and finish["type"] == "stop"
            kind = "tool_calls" if called else finish["type"]
            yield self._delta(index, {"reasoning_content": None}, None, kind, finish.get("matched"))
        answers = {index: {**event, "output_ids": self._ids[index]} for index, event in self._latest.items()}
        sglext = _sglext(self._chat, answers, whole=False)
        if sglext:
            yield {**self._envelope([]), "usage": None, "sglext": sglext}
        if self._option("include_usage"):
            metas = [self._latest[index]["meta_info"] for index in sorted(self._latest)]
            yield {**self._envelope([]), "usage": usage_of(metas, self._chat.copies)}

    def _option(self, name: str) -> bool:
        return bool((self._chat.body.get("stream_options") or {}).get(name))

    def _remember(self, index: int, event: dict[str, Any]) -> None:
        if self._visit.settings.incremental_streaming_output:
            self._ids[index] = self._ids.get(index, []) + event["output_ids"]
        else:
            self._ids[index] = event["output_ids"]
        self._latest[index] = event

    def _new_text(self, index: int, event: dict[str, Any]) -> tuple[str, str]:
        """Return the reasoning and the text that an event adds."""
        delta = event["text"]
        if not self._visit.settings.incremental_streaming_output:
            delta = delta[self._sent_text.get(index, 0) :]
            self._sent_text[index] = len(event["text"])
        if not self._chat.separates_reasoning:
            return "", delta
        parser = self._reasoning.setdefault(index, ReasoningStream(thinking=self._chat.thinking))
        return parser.push(delta, last=_lets_go(event))

    def _parts(self, index: int, delta: str, event: dict[str, Any]) -> list[str | dict[str, Any]]:
        if not self._chat.parses_tools:
            return [delta] if delta else []
        stream = self._tools.setdefault(index, ToolCallStream(self._chat.tool_names))
        parts = stream.push(delta, last=_lets_go(event))
        return parts if event["meta_info"]["finish_reason"] is None else [*parts, *stream.closed()]

    def _new_logprobs(self, index: int, event: dict[str, Any]) -> dict[str, Any] | None:
        if not self._chat.asks("logprobs"):
            return None
        sent, total = self._sent_logprobs.get(index, 0), event["meta_info"]["output_token_logprobs_length"]
        self._sent_logprobs[index] = total
        if sent >= total:
            return None
        incremental = self._visit.settings.incremental_streaming_output
        return _logprobs(self._visit, event["meta_info"], 0 if incremental else sent)

    def _delta(
        self, index: int, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None, matched: Any = None
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish,
            "matched_stop": matched,
        }
        return self._envelope([choice])

    def _envelope(self, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": self._rid,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._chat.model,
            "choices": choices,
        }
