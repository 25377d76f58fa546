"""The route `/generate`, single, batched and streamed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from miles_router.testing.worker.exchange_log import GenerationRecord
from miles_router.testing.worker.model.generation import Generation, GenerationRequest
from miles_router.testing.worker.visit import Visit
from miles_router.testing.worker.wire.generate_input import GenerateInput, parse_generate
from miles_router.testing.worker.wire.sampling_params import WrongType

DONE = b"data: [DONE]\n\n"


async def generate(visit: Visit) -> web.StreamResponse:
    """Handle POST /generate."""
    body = visit.json()
    try:
        given = parse_generate(body, visit.engine)
        async with admitted(visit, given):
            if not given.stream:
                answers = await all_answers(visit, given)
                return await visit.reply.json(answers[0] if given.single else answers)
            async for event in all_events(visit, given):
                await visit.reply.event(event)
    except WrongType as error:
        return await visit.reply.json({"error": str(error)}, 400)
    except ValueError as error:
        return await _refuse(visit, error, stream=bool(body.get("stream")))
    await visit.reply.send(DONE)
    return await visit.reply.end()


async def _refuse(visit: Visit, error: ValueError, *, stream: bool) -> web.StreamResponse:
    """Answer 400. If a stream was requested, SGLang sends the error as an event with status 200."""
    if not stream:
        return await visit.reply.json({"error": {"message": str(error)}}, 400)
    refusal = {"message": str(error), "type": "invalid_request_error", "code": 400, "retryable": False}
    await visit.reply.event({"error": refusal})
    await visit.reply.send(DONE)
    return await visit.reply.end()


@asynccontextmanager
async def admitted(visit: Visit, given: GenerateInput) -> AsyncIterator[None]:
    """Reserve the request's rids for the duration of the block, and wait while the worker is paused.

    Raises:
        ValueError: a rid is in use.
    """
    given.samples = visit.accept(given.samples, given.copies)
    rids = [sample.rid for sample in given.samples]
    visit.engine.reserve(rids)
    try:
        await visit.engine.admission()
        yield
    except (asyncio.CancelledError, ConnectionError):
        visit.engine.client_left(rids, stream=given.stream)
        raise
    finally:
        visit.engine.unreserve(rids)
        if given.stream:
            visit.engine.end_stream(rids)


async def all_answers(visit: Visit, given: GenerateInput) -> list[dict[str, Any]]:
    """Return the finished answer of every sample."""
    if len(given.samples) == 1:
        return [await finished(visit, given.samples[0])]
    return await gather(*(finished(visit, sample) for sample in given.samples))


def all_events(visit: Visit, given: GenerateInput) -> AsyncIterator[dict[str, Any]]:
    """Yield every stream event; with several samples each has the `index` of its sample."""
    return events(visit, given.samples[0]) if given.single else _merged(visit, given.samples)


async def finished(visit: Visit, sample: GenerationRequest) -> dict[str, Any]:
    """Return the answer of one sample that is not streamed."""
    return [event async for event in events(visit, sample)][-1]


async def events(visit: Visit, sample: GenerationRequest) -> AsyncIterator[dict[str, Any]]:
    """Yield each answer of one sample so far, and keep its record up to date."""
    builder = visit.output_builder()
    async for generation in recorded(visit, sample):
        yield builder.render(generation)


async def recorded(visit: Visit, sample: GenerationRequest) -> AsyncIterator[Generation]:
    """Run one sample, yield its generation at each output, and keep its record up to date."""
    engine = visit.engine
    generation = engine.begin(sample)
    record = GenerationRecord(sample.rid, sample.input_ids, dp_rank=generation.dp_rank, lora_path=sample.lora_path)
    visit.exchange.generations.append(record)
    try:
        async for _ in engine.outputs(generation):
            yield generation
    finally:
        engine.end(generation)
        record.update(generation)


async def _merged(visit: Visit, samples: list[GenerationRequest]) -> AsyncIterator[dict[str, Any]]:
    """Yield events of several samples as they arrive, each with the `index` of its sample."""
    queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(maxsize=len(samples))

    async def pump(index: int, sample: GenerationRequest) -> None:
        async for event in events(visit, sample):
            await queue.put({**event, "index": index})
        await queue.put(None)

    pumps = asyncio.ensure_future(gather(*(pump(index, sample) for index, sample in enumerate(samples))))
    try:
        for _ in samples:
            while (event := await queue.get()) is not None:
                yield event
    finally:
        pumps.cancel()
        await asyncio.wait([pumps])


async def gather(*coroutines: Any) -> list[Any]:
    """Run coroutines like `asyncio.gather`; on cancellation or failure, cancel the others and wait for them."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
