"""slime: the names that its Namespace has for our settings, ours to theirs. The rest it shares with miles."""

from __future__ import annotations

#: Its name -> ours. What is absent or None keeps our default.
NAMES = {
    "slime_router_health_check_failure_threshold": "health_check_failure_threshold",
    "slime_router_max_connections": "max_connections",
    "slime_router_timeout": "request_timeout",
}
PREFIX = "slime_router_"
MIDDLEWARE_PATHS = "slime_router_middleware_paths"
#: Where its middlewares stood -> where ours stand.
OLD_PATHS = {"slime.router.middleware_hub.": "middleware_hub."}
