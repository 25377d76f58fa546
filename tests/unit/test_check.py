"""`miles-router check`: good classes pass every clause, bad ones are told which they break."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from miles_router.check import check_path
from miles_router.settings.config import RouterConfig
from miles_router.testing import check_middleware
from tests.support.cache_trial import checkpoint


@pytest.mark.parametrize(
    "path",
    [
        "middleware_hub.radix_tree_middleware.RadixTreeMiddleware",
        "middleware_hub.openai_session_middleware.OpenAISessionMiddleware",
        "middleware_hub.routed_experts_middleware.RoutedExpertsMiddleware",
    ],
)
def test_so_do_those_that_ship_with_the_router(path: str) -> None:
    verdicts = dict(check_path(path, RouterConfig(hf_checkpoint=checkpoint())))
    assert len(verdicts) == 8
    assert set(verdicts.values()) == {None}


class _Swallowing:
    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self.app(scope, receive, send)
        except Exception:  # noqa: BLE001 - the defect this class is here to show
            await send({"type": "http.response.start", "status": 500, "headers": []})


class _Sharing:
    body = b""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        message = await receive()
        _Sharing.body = message["body"]

        async def again() -> Any:
            await asyncio.sleep(0)
            return {"type": "http.request", "body": _Sharing.body}

        await self.app(scope, again, send)


class _Leaking:
    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            self.task = asyncio.ensure_future(self.app(scope, receive, send))
            await asyncio.shield(self.task)
        else:
            await self.app(scope, receive, send)


@pytest.mark.parametrize(
    ("layer", "clause", "problem"),
    [
        (_Swallowing, "lets errors through as themselves", "swallowed"),
        (_Sharing, "keeps 100 concurrent requests and two instances apart", "mixed up"),
        (_Sharing, "tells the inner app when the client leaves", "http.disconnect"),
        (_Sharing, "passes other scopes on", "scopes other than http"),
        (_Leaking, "survives cancellation and leaves no task", "not cancelled"),
    ],
)
async def test_a_broken_class_is_told_what_it_breaks(layer: Any, clause: str, problem: str) -> None:
    verdicts = dict(await check_middleware(layer))
    assert problem in (verdicts[clause] or "")
