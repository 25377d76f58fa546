"""miles: the names in its Namespace and its samples, mapped to the router's (radixark/miles at 31f1ca961)."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles_router.trajectory.sample import Sample

#: miles' name -> the router's setting. Absent or None keeps the default. The first name of a setting wins.
NAMES = {
    "sglang_router_ip": "host",
    "sglang_router_port": "port",
    "rollout_health_check_interval": "health_check_interval",
    "miles_router_health_check_failure_threshold": "health_check_failure_threshold",
    "miles_router_max_connections": "max_connections",
    "miles_router_timeout": "request_timeout",
    "sglang_router_request_timeout_secs": "request_timeout",
    "hf_checkpoint": "hf_checkpoint",
    "chat_template_path": "chat_template_path",
}
PREFIXES = ("miles_router_", "sglang_router_")
MIDDLEWARE_PATHS = "miles_router_middleware_paths"
#: Module path of miles' middlewares -> the router's.
OLD_PATHS = {"miles.router.middleware_hub.": "middleware_hub."}
POLICY = "sglang_router_policy"
#: Policies that tie a key to a worker, as `X-SMG-Routing-Key` does here.
KEY_POLICIES = ("manual", "consistent_hashing")

SESSION_HOST, SESSION_PORT = "session_server_ip", "session_server_port"
#: The adapter name of a run in miles' engines (`LORA_ADAPTER_NAME`).
ADAPTER = "miles_lora"
#: `--session-message-matcher` -> `message_equality`; anything else is a dotted path.
MATCHERS = {"strict": "strict", "loose_tool_call": "tool-arguments-as-json"}
#: Hooks over miles' own `Sample` objects. Their defaults equal the router's branch policy and loss mask.
HOOKS = {
    "session_sample_picker_path": "miles.rollout.session.v2.picker_hub.drop_retries",
    "session_sample_postprocessor_path": "miles.rollout.session.v2.postprocessor_hub.default_postprocess",
}
#: Option that requires rows in samples -> the kind of these rows.
REPLAYS = {"use_rollout_routing_replay": "routed_experts", "use_rollout_indexer_replay": "indexer_topk"}


class Unsupported(ValueError):
    """A framework option that the router does not support. The message begins with the option's name."""


def check_policy(args: Namespace) -> None:
    """Check that the router has the balancing policy.

    Raises:
        Unsupported: the router has no such policy.
    """
    policy = getattr(args, POLICY, None)
    if policy is not None and policy not in KEY_POLICIES:
        raise Unsupported(
            f"{POLICY}: {policy!r} is not supported; the router chooses by requests in flight, and a routing "
            f"key stays on its worker ({', '.join(KEY_POLICIES)}, or none)"
        )


def session_options(args: Namespace) -> dict[str, Any]:
    """Return the options of the session middleware that correspond to a Namespace.

    Raises:
        Unsupported: the Namespace asks for something that sessions do not support.
    """
    for name, default in HOOKS.items():
        if getattr(args, name, None) not in (None, default):
            raise Unsupported(f"{name}: not supported, it runs over the framework's samples; use branch_policies")
    matcher = getattr(args, "session_message_matcher", None) or "strict"
    if matcher == "role_content_only":
        raise Unsupported("session_message_matcher: 'role_content_only' is not supported: it ignores tool calls")
    options: dict[str, Any] = {
        "tito_model": _tito_model(args),
        "chat_template_kwargs": dict(getattr(args, "apply_chat_template_kwargs", None) or {}),
        "lora_path": ADAPTER if _serves_adapter(args) else "",
        "message_equality": MATCHERS.get(matcher, matcher),
        "default_branches": "drop-superseded" if getattr(args, "use_session_server", None) == "v2" else "",
    }
    return {name: value for name, value in options.items() if value}


def replayed_rows(args: Namespace) -> dict[str, str]:
    """Return the kinds of rows that samples must contain, by the option that requires them."""
    return {name: kind for name, kind in REPLAYS.items() if getattr(args, name, False)}


def _tito_model(args: Namespace) -> str:
    named = getattr(args, "tito_model", None)
    return "" if named in (None, "default") else str(named)


def _serves_adapter(args: Namespace) -> bool:
    """Return whether the engines serve the adapter in training (`lora_rollout_enabled`)."""
    trained = (getattr(args, "lora_rank", None) or 0) > 0 or getattr(args, "lora_adapter_path", None) is not None
    return trained and not getattr(args, "lora_train_only", False)


def trainer_fields(sample: Sample, *, arrays: bool = False) -> dict[str, Any]:
    """Return the fields with which the `Sample` of miles and slime is updated: `Sample.from_dict({**given.to_dict(),
    **trainer_fields(sample)})`.

    There `loss_mask`, `rollout_log_probs` and slime's `teacher_log_probs` cover the response alone, versions are a list
    of names, and `status` is the value of an enumeration. Reward and label are left out if they are None, so that those
    of the given sample stay; its metadata stays if the rollout was given it. With `arrays`, numpy arrays are not
    converted to lists. A sampling mask is an object of miles' own: `RolloutSamplingMask(mask.ids, mask.offsets)` with
    `mask = sample.sampling_mask.cut(sample.prompt_length, len(sample))`; its `rollout_log_probs` are `mask.logprobs`.
    """
    start = sample.prompt_length
    aligned: Mapping[str, Any] = {
        "tokens": sample.tokens,
        "loss_mask": sample.loss_mask[start:],
        "rollout_log_probs": sample.logprobs[start:],
        **({} if sample.teacher is None else {"teacher_log_probs": sample.teacher.logprobs[start:]}),
    }
    made: Mapping[str, Any] = {
        **(aligned if arrays else {name: array.tolist() for name, array in aligned.items()}),
        "response": sample.response,
        "response_length": sample.response_length,
        "weight_versions": [run.version for run in sample.weight_versions],
        "status": sample.status,
        "metadata": dict(sample.metadata),
    }
    optional = {"reward": sample.reward, "label": sample.label}
    optional |= {f"rollout_{name}": rows for name, rows in sample.rows.items()}
    return {**made, **{name: value for name, value in optional.items() if value is not None}}
