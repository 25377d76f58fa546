"""slime and miles: the names in their Namespace and in their samples, ours to theirs."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles_router.settings.config import RouterConfig
    from miles_router.trajectory.sample import Sample


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
    optional = {"reward": sample.reward, "label": sample.label, "rollout_routed_experts": sample.routed_experts}
    return {**made, **{name: value for name, value in optional.items() if value is not None}}
