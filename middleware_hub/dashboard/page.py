"""Routes for the dashboard's page, its scripts and its style sheets. The page reads the administration routes.

The token view, and the scripts that all pages share, come from `middleware_hub.view`, in its `assets/`.
"""

from __future__ import annotations

from functools import partial
from importlib import resources
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

if TYPE_CHECKING:
    from importlib.abc import Traversable

PAGE = "/dashboard"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
#: URL folder below the page -> package and folder of its files. Scripts import each other by these URLs.
FOLDERS = {
    "own": ("middleware_hub.dashboard", "assets"),
    "uplot": ("middleware_hub.dashboard", "vendor/uplot"),
    "view": ("middleware_hub.view", "assets"),
}
HEADERS = {
    # Scripts and styles only from this server, no text as markup, no framing by another page.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def dashboard_routes() -> list[BaseRoute]:
    """Return routes for the page and each of its files. They need no key: they contain nothing about the router."""
    return [_route(PAGE, _folder("own") / "page.html"), *(_route(path, file) for path, file in _files().items())]


def _folder(name: str) -> Traversable:
    package, folder = FOLDERS[name]
    return resources.files(package).joinpath(*folder.split("/"))


def _files() -> dict[str, Traversable]:
    every = ((f"{PAGE}/{name}/{file.name}", file) for name in FOLDERS for file in _folder(name).iterdir())
    return {path: file for path, file in sorted(every, key=lambda each: each[0]) if path.endswith((".js", ".css"))}


def _route(path: str, file: Traversable) -> BaseRoute:
    return Route(path, partial(_answer, file), methods=["GET"])


async def _answer(file: Traversable, request: Request) -> Response:
    media_type = TYPES[file.name[file.name.rindex(".") :]]
    return Response(file.read_bytes(), media_type=media_type, headers=HEADERS)
