"""A request is held against the routes that begin as its path does."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from miles_router.asgi.own_routes import OwnRoutes
from tests.support.waiting import at_once


class Unasked(Route):
    """A route that nobody may look at."""

    def matches(self, scope: Any) -> Any:
        raise AssertionError(f"{scope['path']} is none of {self.path}")


def route(path: str, text: str, *methods: str) -> Route:
    async def answer(request: Request) -> PlainTextResponse:
        return PlainTextResponse(text)

    return Route(path, answer, methods=methods or None)


async def default(scope: Any, receive: Any, send: Any) -> None:
    await PlainTextResponse("default")(scope, receive, send)


def answered(routes: OwnRoutes, method: str, path: str) -> str:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b""}
    at_once(routes(scope, None, send))  # type: ignore[arg-type]  # nothing is received
    return b"".join(message.get("body", b"") for message in sent).decode()


@pytest.mark.parametrize(
    ("method", "path", "text"),
    [
        ("GET", "/a", "one"),
        ("POST", "/a", "two"),
        ("GET", "/a/b/c", "three"),
        ("GET", "/a/x", "default"),
        ("GET", "/ab", "default"),
        ("GET", "/", "default"),
    ],
)
def test_the_routes_of_a_segment_answer_in_their_order_and_others_are_not_looked_at(
    method: str, path: str, text: str
) -> None:
    async def never(request: Request) -> PlainTextResponse:
        raise AssertionError

    routes = OwnRoutes(
        [
            Unasked("/b", never),
            route("/a", "one", "GET"),
            route("/a", "two", "POST"),
            Unasked("/c/{rest:path}", never),
            route("/a/{name}/c", "three"),
        ],
        default,
    )
    assert answered(routes, method, path) == text
