"""SGLang's control requests (0.5.23, `entrypoints/http_server.py`). Pure."""

from __future__ import annotations

import orjson

from miles_router.engines import paths
from miles_router.engines.actions import Abort, Action, Continue, Flush, NameVersion, Order, Pause


def order(action: Action) -> Order:
    """Return the request for an action. SGLang refuses most of these without a body."""
    path, fields = _spelled(action)
    return Order("POST", path.encode(), orjson.dumps(fields))


def _spelled(action: Action) -> tuple[str, dict[str, object]]:
    match action:
        case Pause(mode):
            return paths.PAUSE, {"mode": mode}
        case Continue():
            return paths.CONTINUE, {}
        case Abort(name):
            return paths.ABORT, {"rid": name}
        case Flush():
            return paths.FLUSH, {}
        case NameVersion(version):
            return paths.UPDATE_VERSION, {"new_version": version, "abort_all_requests": False}
