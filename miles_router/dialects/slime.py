"""slime and miles: the names in their Namespace, theirs to ours and ours to theirs."""

from __future__ import annotations

from argparse import Namespace

from miles_router.settings.config import RouterConfig

#: Their name -> ours. What is absent or None keeps our default.
NAMES = {
    "sglang_router_ip": "host",
    "sglang_router_port": "port",
    "rollout_health_check_interval": "health_check_interval",
    "miles_router_health_check_failure_threshold": "health_check_failure_threshold",
    "miles_router_max_connections": "max_connections",
    "miles_router_timeout": "request_timeout",
    "hf_checkpoint": "hf_checkpoint",
    "chat_template_path": "chat_template_path",
}
#: Bounds that are 0 here where there is none, and None there.
BOUNDS = frozenset({"max_connections", "request_timeout"})
MIDDLEWARE_PATHS = "miles_router_middleware_paths"


def settings_of(args: Namespace) -> dict[str, str]:
    """Our settings that a framework's Namespace names, as text."""
    given = {ours: getattr(args, theirs, None) for theirs, ours in NAMES.items()}
    return {ours: str(value) for ours, value in given.items() if value is not None}


def namespace_of(config: RouterConfig) -> Namespace:
    """The names under which such frameworks' own middlewares look settings up."""
    values = {theirs: getattr(config, ours) for theirs, ours in NAMES.items()}
    unbounded = {theirs: None for theirs, ours in NAMES.items() if ours in BOUNDS and not values[theirs]}
    return Namespace(**{**values, **unbounded}, **{MIDDLEWARE_PATHS: [spec.path for spec in config.middlewares]})
