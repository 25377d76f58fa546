"""An engine that is nothing but an app of Starlette, whose routing FastAPI has: what its endpoints were called for is
written down, and nothing else is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from miles_router.engines import paths
from miles_router.engines.known import CONTROL, GENERATION
from miles_router.serving.server import listen
from tests.support.running_router import serving

#: Control endpoints of SGLang that the router does not know.
UNKNOWN = (
    "/update_weights_from_tensor",
    "/update_weights_from_distributed",
    "/init_weights_update_group",
    "/set_internal_state",
    "/weights_checker",
    "/open_session",
)
TOLD = [*CONTROL, *UNKNOWN]
METHODS = ["GET", "POST", "PUT", "DELETE"]


class PlainEngine:
    """`url`, and under which names its endpoints were called."""

    def __init__(self) -> None:
        self.url = ""
        self.called: list[str] = []
        named = [*TOLD, *sorted(GENERATION), paths.MODELS, f"{paths.MODELS}/{{model:path}}"]
        self.app = Starlette(routes=[Route(path, self._endpoint(path), methods=METHODS) for path in named])

    def _endpoint(self, path: str) -> Callable[[Request], Awaitable[Response]]:
        async def called(request: Request) -> Response:
            self.called.append(path)
            return JSONResponse({"called": path, "model": request.path_params.get("model")})

        return called


@contextlib.asynccontextmanager
async def plain_engine() -> AsyncIterator[PlainEngine]:
    engine = PlainEngine()
    config = uvicorn.Config(engine.app, lifespan="off", ws="none", log_config=None, access_log=False)
    async with serving(config, listen("127.0.0.1", 0)) as (_, engine.url):
        yield engine
