"""`miles-router check`: the middleware contract, clause by clause, held against anybody's class."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator

from miles_router.app import create_app
from miles_router.middlewares.contract import ASGIApp
from miles_router.middlewares.loading import find_class, load_middlewares
from miles_router.settings.config import MiddlewareSpec, RouterConfig
from miles_router.testing.middleware_contract import check_middleware


def check_path(path: str, config: RouterConfig) -> Iterator[tuple[str, str | None]]:
    """Each clause of the contract with what broke it, or None.

    Options given for `path` in the configuration are used; the rest of the stack is left out.

    Raises:
        MiddlewareLoadError: the class cannot be loaded at all.
    """
    find_class(path)
    spec = next((spec for spec in config.middlewares if spec.path == path), MiddlewareSpec(path))
    loaded = load_middlewares([spec])[0]
    router = create_app(dataclasses.replace(config, middlewares=(), worker_urls=())).router

    def build(inner: ASGIApp) -> ASGIApp:
        return loaded.cls(inner, router=router, **loaded.options)

    yield from asyncio.run(check_middleware(build))
