"""The route `/v1/completions`, whole and streamed."""

import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from miles_router.testing.worker.routes.native import all_answers, all_events
from miles_router.testing.worker.routes.openai import conversion, sampling_of, serve
from miles_router.testing.worker.visit import Visit, invalid_body
from miles_router.testing.worker.wire.chat_request import schema_of
from miles_router.testing.worker.wire.chat_schema import NOT_NULL_OF_COMPLETIONS, nulls_in
from miles_router.testing.worker.wire.generate_input import GenerateInput, parse_generate
from miles_router.testing.worker.wire.openai_parts import (
    completion_logprobs,
    metadata_of,
    routed_rank,
    usage_of,
)


@dataclass(slots=True)
class _Completion:
    """A parsed `/v1/completions` request."""

    given: GenerateInput
    body: dict[str, Any]
    echoes: list[str]
    model: str
    copies: int

    def echo(self, index: int) -> str:
        return self.echoes[index // self.copies] if self.body.get("echo") else ""


async def completions(visit: Visit) -> web.StreamResponse:
    """Handle POST /v1/completions."""
    return await serve(visit, _parse, _answer, _chunks)


def _parse(visit: Visit, body: dict[str, Any]) -> _Completion:
    if problems := nulls_in(body, NOT_NULL_OF_COMPLETIONS):
        raise invalid_body(*problems)
    prompt = body.get("prompt")
    if prompt == "" or prompt == []:
        raise ValueError("Prompt cannot be empty")
    if not isinstance(prompt, (str, list)):
        raise invalid_body({"type": "missing", "loc": ("body", "prompt"), "msg": "Field required"})
    params = sampling_of(body)
    if body.get("json_schema") is not None:
        params["json_schema"] = body["json_schema"]
    params["max_new_tokens"] = body.get("max_tokens", 16)
    with conversion():
        schema = schema_of(body.get("response_format"))
    if schema is not None:
        params["json_schema"] = schema
    texts = isinstance(prompt, str) or isinstance(prompt[0], str)
    native = {
        "text" if texts else "input_ids": prompt,
        "sampling_params": params,
        "rid": body.get("rid"),
        "stream": body.get("stream"),
        "return_logprob": body.get("logprobs") is not None,
        "top_logprobs_num": body.get("logprobs") or 0,
        "logprob_start_len": 0 if body.get("echo") and body.get("logprobs") else -1,
        "return_text_in_logprobs": True,
        "return_routed_experts": body.get("return_routed_experts"),
        "routed_experts_start_len": body.get("routed_experts_start_len"),
        "return_prompt_token_ids": True,
        "lora_path": visit.adapter_in(body),
        "extra_key": body.get("extra_key"),
        "routed_dp_rank": routed_rank(visit, body),
    }
    echoes = _echoes(visit, prompt) if body.get("echo") else []
    model, copies = str(body.get("model") or "default"), int(body.get("n") or 1)
    return _Completion(parse_generate(native, visit.engine, turn=True), body, echoes, model, copies)


def _echoes(visit: Visit, prompt: Any) -> list[str]:
    """Return the text of every prompt."""
    single = isinstance(prompt, str) or isinstance(prompt[0], int)
    decode = visit.engine.model.tokenizer.decode
    prompts = [prompt] if single else prompt
    return [part if isinstance(part, str) else decode(part, skip_special_tokens=True) for part in prompts]


async def _answer(visit: Visit, asked: _Completion) -> dict[str, Any]:
    answers = await all_answers(visit, asked.given)
    first = answers[0]["meta_info"]
    response: dict[str, Any] = {
        "id": first["id"],
        "object": "text_completion",
        "created": int(time.time()),
        "model": asked.model,
        "choices": [_choice(visit, asked, index, answer) for index, answer in enumerate(answers)],
        "usage": usage_of([answer["meta_info"] for answer in answers], asked.copies),
        "metadata": metadata_of(first),
    }
    if asked.body.get("return_routed_experts") and "routed_experts" in first:
        response["sglext"] = {"routed_experts": first["routed_experts"]}
    return response


def _choice(visit: Visit, asked: _Completion, index: int, answer: dict[str, Any]) -> dict[str, Any]:
    meta = answer["meta_info"]
    finish = meta["finish_reason"]
    choice = {
        "index": index,
        "text": asked.echo(index) + answer["text"],
        "logprobs": _logprobs(visit, asked, meta, 0) if asked.body.get("logprobs") is not None else None,
        "finish_reason": finish["type"],
        "matched_stop": finish.get("matched"),
    }
    if asked.body.get("return_token_ids"):
        choice["token_ids"] = answer["output_ids"]
        choice["prompt_token_ids"] = answer["prompt_token_ids"]
    return choice


def _logprobs(visit: Visit, asked: _Completion, meta: dict[str, Any], start: int) -> dict[str, Any]:
    """Return a choice's logprobs from output position `start` on, preceded by the logprobs of an echoed prompt."""
    triples = meta["output_token_logprobs"][start:]
    tops = meta.get("output_top_logprobs", [])[start:]
    if start == 0 and asked.body.get("echo"):
        triples = meta["input_token_logprobs"] + triples
        tops = meta.get("input_top_logprobs", []) + tops
    return completion_logprobs(visit.engine.model.tokenizer, triples, tops)


async def _chunks(visit: Visit, asked: _Completion) -> AsyncIterator[dict[str, Any]]:
    writer = _ChunkWriter(visit, asked)
    async for event in all_events(visit, asked.given):
        yield writer.chunk(event)
    for chunk in writer.last_chunks():
        yield chunk


class _ChunkWriter:
    """A converter from the engine's events to completion chunks. It tracks what was sent of each choice."""

    def __init__(self, visit: Visit, asked: _Completion) -> None:
        self._visit = visit
        self._asked = asked
        self._created = int(time.time())
        self._incremental = visit.settings.incremental_streaming_output
        self._latest: dict[int, dict[str, Any]] = {}
        self._sent_text: dict[int, int] = {}
        self._sent_ids: dict[int, int] = {}

    def chunk(self, event: dict[str, Any]) -> dict[str, Any]:
        index, meta = event.get("index", 0), event["meta_info"]
        first = index not in self._latest
        self._latest[index] = event
        text, finish = self._new_text(index, event), meta["finish_reason"] or {}
        choice = {
            "index": index,
            "text": self._asked.echo(index) + text if first else text,
            "logprobs": self._new_logprobs(index, meta),
            "finish_reason": finish.get("type"),
            "matched_stop": finish.get("matched"),
        }
        if self._asked.body.get("return_token_ids"):
            start = 0 if self._incremental else self._sent_ids.get(index, 0)
            choice["token_ids"] = event["output_ids"][start:]
            if first:
                choice["prompt_token_ids"] = event["prompt_token_ids"]
        self._sent_ids[index] = meta["completion_tokens"]
        return {**self._envelope(event, [choice]), "usage": None}

    def last_chunks(self) -> Iterator[dict[str, Any]]:
        event = self._latest[max(self._latest)]
        routes = self._latest[min(self._latest)]["meta_info"].get("routed_experts")
        if self._asked.body.get("return_routed_experts") and routes is not None:
            yield {**self._envelope(event, []), "usage": None, "sglext": {"routed_experts": routes}}
        if (self._asked.body.get("stream_options") or {}).get("include_usage"):
            metas = [self._latest[index]["meta_info"] for index in sorted(self._latest)]
            usage = usage_of(metas, self._asked.copies)
            yield {
                **self._envelope(event, []),
                "usage": {key: value for key, value in usage.items() if value is not None},
            }

    def _new_text(self, index: int, event: dict[str, Any]) -> str:
        text = str(event["text"])
        if self._incremental:
            return text
        start, self._sent_text[index] = self._sent_text.get(index, 0), len(text)
        return text[start:]

    def _new_logprobs(self, index: int, meta: dict[str, Any]) -> dict[str, Any] | None:
        if self._asked.body.get("logprobs") is None:
            return None
        sent = self._sent_ids.get(index, 0)
        if sent >= meta["output_token_logprobs_length"]:
            return None
        return _logprobs(self._visit, self._asked, meta, 0 if self._incremental else sent)

    def _envelope(self, event: dict[str, Any], choices: list[Any]) -> dict[str, Any]:
        return {
            "id": event["meta_info"]["id"],
            "object": "text_completion",
            "created": self._created,
            "model": self._asked.model,
            "choices": choices,
        }
