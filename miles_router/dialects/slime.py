"""slime and miles: the names in their Namespace, theirs to ours and ours to theirs."""

from __future__ import annotations

from argparse import Namespace

from miles_router.settings.config import RouterConfig


def legacy_args(config: RouterConfig) -> Namespace:
    """The names under which training frameworks' own middlewares look settings up."""
    return Namespace(
        hf_checkpoint=config.hf_checkpoint,
        chat_template_path=config.chat_template_path,
        sglang_router_ip=config.host,
        sglang_router_port=config.port,
        miles_router_middleware_paths=[spec.path for spec in config.middlewares],
        rollout_health_check_interval=config.health_check_interval,
        miles_router_health_check_failure_threshold=config.health_check_failure_threshold,
        miles_router_max_connections=config.max_connections or None,
        miles_router_timeout=config.request_timeout or None,
    )
