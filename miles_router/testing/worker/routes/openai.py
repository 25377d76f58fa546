"""Code shared by the chat and completions routes: error answers, sampling fields, whole and streamed replies."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from aiohttp import web

from miles_router.testing.worker.routes.native import DONE, admitted
from miles_router.testing.worker.visit import Visit
from miles_router.testing.worker.wire.generate_input import GenerateInput
from miles_router.testing.worker.wire.openai_parts import refuse, require_json
from miles_router.testing.worker.wire.sampling_params import WrongType

#: Fields of a body that are the engine's sampling parameters with the same name.
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "regex",
    "ebnf",
    "n",
    "no_stop_trim",
    "ignore_eos",
    "skip_special_tokens",
    "logit_bias",
)


class ConversionError(ValueError):
    """An OpenAI request cannot be converted to the engine's; SGLang answers these with another error type."""


class Parsed(Protocol):
    """A parsed request."""

    given: GenerateInput


Request = TypeVar("Request", bound=Parsed)


@contextmanager
def conversion() -> Iterator[None]:
    """Convert a ValueError from the block into a ConversionError."""
    try:
        yield
    except ValueError as error:
        raise ConversionError(str(error)) from error


def sampling_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's sampling parameters from an OpenAI body, including `min_tokens` and `seed`."""
    params = {name: body[name] for name in SAMPLING_FIELDS if body.get(name) is not None}
    params["min_new_tokens"] = body.get("min_tokens") or 0
    if body.get("seed") is not None:
        params["sampling_seed"] = body["seed"]
    return params


async def serve(
    visit: Visit,
    parse: Callable[[Visit, dict[str, Any]], Request],
    answer: Callable[[Visit, Request], Awaitable[dict[str, Any]]],
    chunks: Callable[[Visit, Request], AsyncIterator[dict[str, Any]]],
) -> web.StreamResponse:
    """Parse a request and reply with its answer or its chunks; answer 400 if it is refused."""
    require_json(visit)
    try:
        request = parse(visit, visit.json())
    except WrongType as error:
        return await refuse(visit, str(error), "Bad Request")
    except ConversionError as error:
        return await refuse(visit, str(error), "BadRequest")
    except ValueError as error:
        return await refuse(visit, str(error))
    try:
        async with admitted(visit, request.given):
            if not request.given.stream:
                return await visit.reply.json(await answer(visit, request))
            async for chunk in chunks(visit, request):
                await visit.reply.event(chunk)
    except ValueError as error:
        return await refuse(visit, str(error))
    await visit.reply.send(DONE)
    return await visit.reply.end()
