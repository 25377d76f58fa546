"""Translation of requests for engines whose API differs from SGLang's.

For an engine that accepts only token ids as a prompt, the worker first tokenizes the text.
"""

from __future__ import annotations

import asyncio

import orjson

from miles_router import tasks
from miles_router.engines.engine import CannotServe, Engine, Parts, Translation
from miles_router.engines.generate import GenerateRequest, UnknownShape
from miles_router.engines.json_bytes import read_json
from miles_router.engines.paths import GENERATE
from miles_router.errors import BadRequest, UpstreamTimeout
from miles_router.fleet.workers import Worker
from miles_router.forwarding.forwarded import Outgoing, send
from miles_router.forwarding.upstream import Upstream

OK = 200
TOKENIZE_TIMEOUT = 60.0  # timeout of tokenizing one text, in seconds
MAX_ANSWER = 1 << 28
CONCURRENT = 8  # texts of one request that its worker tokenizes at the same time


async def translation_for(
    upstream: Upstream, worker: Worker, engine: Engine, request: Outgoing
) -> Translation | Parts | None:
    """Return the translation of a request for an engine; None if the request is sent unchanged.

    Raises:
        BadRequest: the request has a form that cannot be translated.
        CannotServe: the engine cannot answer this request correctly.
        UpstreamError: the worker did not answer the request to tokenize the text.
    """
    try:
        body = request.body
        if engine.ids_only and request.endpoint == GENERATE:
            body = await _with_ids(upstream, worker, engine, request)
        return engine.translate(request.path, body, read_json)
    except UnknownShape as error:
        raise BadRequest(f"the request cannot be translated for the worker's engine: {error.reason}") from None


async def _with_ids(upstream: Upstream, worker: Worker, engine: Engine, request: Outgoing) -> bytes:
    """Return the body of a `/generate` request with token ids in place of texts.

    Raises:
        UnknownShape: the request cannot be read.
        The errors of `translation_for`.
    """
    read = GenerateRequest.read(read_json(request.body))
    if engine.max_prompts is not None and len(read.prompts) > engine.max_prompts:
        raise CannotServe(f"a request may have at most {engine.max_prompts} prompts: send several requests")
    texts = [prompt.text for prompt in read.prompts if prompt.text is not None]
    if len(texts) < len(read.prompts):
        return request.body
    ids: list[list[int]] = [[] for _ in texts]
    turns = asyncio.Semaphore(CONCURRENT)

    async def tokenize(place: int) -> None:
        async with turns:
            ids[place] = await _tokenize(upstream, worker, engine, request, texts[place])

    await tasks.together([tokenize(place) for place in range(len(texts))], name="tokenize")
    return orjson.dumps(read.with_ids(ids))


async def _tokenize(upstream: Upstream, worker: Worker, engine: Engine, request: Outgoing, text: str) -> list[int]:
    question = engine.ask_prompt_tokens(text)
    if question is None:
        raise CannotServe("it takes only token ids as a prompt, and cannot tokenize texts")
    headers = [(b"content-type", b"application/json")]
    headers += [pair for pair in request.headers if pair[0] == b"authorization"]
    asked = Outgoing("POST", question.path.encode("ascii"), headers, orjson.dumps(question.body))

    async def ask() -> tuple[int, bytes]:
        reply = await send(upstream, worker, asked, slot=False)
        try:
            return reply.status, await reply.read_all(MAX_ANSWER)
        finally:
            reply.close()

    try:
        status, answer = await tasks.within(TOKENIZE_TIMEOUT, ask(), name=f"tokenize at {worker.url}")
    except TimeoutError:
        raise UpstreamTimeout(f"{worker.url}{question.path} did not answer within {TOKENIZE_TIMEOUT:g} s") from None
    parsed = read_json(answer) if status == OK else None
    ids = question.read(parsed) if isinstance(parsed, dict) else None
    if ids is None:
        raise CannotServe(f"it did not tokenize the prompt: {question.path} answered {status}")
    return ids
