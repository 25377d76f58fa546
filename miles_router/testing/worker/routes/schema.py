"""The route `GET /openapi.json`: the worker's paths, and some fields of its requests."""

from collections.abc import Iterable

from aiohttp import web

from miles_router.testing.worker.routes.control import Route
from miles_router.testing.worker.visit import Visit
from miles_router.testing.worker.wire.chat_request import CHAT_FIELDS


def openapi(
    routes: Iterable[tuple[str, str]],
    chat_fields: Iterable[str] = CHAT_FIELDS,
    native_fields: Iterable[str] = ("extra_key", "routed_dp_rank"),
) -> Route:
    """Return the route, which answers with a schema of these `(method, path)` pairs and request fields."""
    paths: dict[str, dict[str, object]] = {}
    for method, path in routes:
        paths.setdefault(path, {})[method.lower()] = {"responses": {"200": {"description": "Successful Response"}}}
    cached = {"type": "object", "properties": {"extra_key": {}}}
    native = {"type": "object", "properties": {name: {} for name in native_fields}}
    chat_request = {"type": "object", "properties": {name: {} for name in chat_fields}, "required": ["messages"]}
    schema = {
        "openapi": "3.1.0",
        "info": {"title": "FastAPI", "version": "0.1.0"},
        "paths": paths,
        "components": {
            "schemas": {"ChatCompletionRequest": chat_request, "GenerateReqInput": native, "CompletionRequest": cached}
        },
    }

    async def answer(visit: Visit) -> web.StreamResponse:
        return await visit.reply.json(schema)

    return answer
