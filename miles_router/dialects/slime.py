"""slime and miles: the names in their Namespace and in their samples, ours to theirs."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles_router.settings.config import RouterConfig
    from miles_router.trajectory.sample import Sample

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


def trainer_fields(sample: Sample) -> dict[str, Any]:
    """What their `Sample` is updated with: `Sample.from_dict({**given.to_dict(), **trainer_fields(sample)})`.

    There `loss_mask` and `rollout_log_probs` cover the response alone, versions are a list of names, and `status` is
    the value of an enumeration. Reward and label are left out where there are none, so that those of the given sample
    stay; its metadata stays if the rollout was given it.
    """
    start = sample.prompt_length
    made: dict[str, Any] = {
        "tokens": sample.tokens.tolist(),
        "response": sample.response,
        "response_length": sample.response_length,
        "loss_mask": sample.loss_mask[start:].tolist(),
        "rollout_log_probs": sample.logprobs[start:].tolist(),
        "weight_versions": [run.version for run in sample.weight_versions],
        "status": sample.status,
        "metadata": dict(sample.metadata),
    }
    optional = {"reward": sample.reward, "label": sample.label}
    optional |= {f"rollout_{name}": rows for name, rows in sample.rows.items()}
    return {**made, **{name: value for name, value in optional.items() if value is not None}}
