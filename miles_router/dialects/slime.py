"""slime: the names of settings in its Namespace, mapped to the router's. The rest it shares with miles."""

from __future__ import annotations

#: slime's name -> the router's setting. Absent or None keeps the default.
NAMES = {
    "slime_router_health_check_failure_threshold": "health_check_failure_threshold",
    "slime_router_max_connections": "max_connections",
    "slime_router_timeout": "request_timeout",
}
PREFIX = "slime_router_"
MIDDLEWARE_PATHS = "slime_router_middleware_paths"
#: Module path of slime's middlewares -> the router's.
OLD_PATHS = {"slime.router.middleware_hub.": "middleware_hub."}
