"""miles-router: the router between RL rollouts and their SGLang workers.

This module exports the public names. Each is imported at its first use, so that `import miles_router` stays fast.
"""

from typing import TYPE_CHECKING, Any

from miles_router.version import __version__

if TYPE_CHECKING:
    from miles_router.app import create_app
    from miles_router.asgi.exchange import Exchange, replay
    from miles_router.compat import run_router, run_session_server
    from miles_router.edge import RouterApp
    from miles_router.metrics.metrics import Statistics, counter, gauge, histogram
    from miles_router.middlewares.router import Router
    from miles_router.settings.config import MiddlewareSpec, RouterConfig

_HOMES = {
    "Exchange": "miles_router.asgi.exchange",
    "MiddlewareSpec": "miles_router.settings.config",
    "Router": "miles_router.middlewares.router",
    "RouterApp": "miles_router.edge",
    "RouterConfig": "miles_router.settings.config",
    "Statistics": "miles_router.metrics.metrics",
    "counter": "miles_router.metrics.metrics",
    "create_app": "miles_router.app",
    "gauge": "miles_router.metrics.metrics",
    "histogram": "miles_router.metrics.metrics",
    "replay": "miles_router.asgi.exchange",
    "run_router": "miles_router.compat",
    "run_session_server": "miles_router.compat",
}

__all__ = [
    "Exchange",
    "MiddlewareSpec",
    "Router",
    "RouterApp",
    "RouterConfig",
    "Statistics",
    "__version__",
    "counter",
    "create_app",
    "gauge",
    "histogram",
    "replay",
    "run_router",
    "run_session_server",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'miles_router' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
