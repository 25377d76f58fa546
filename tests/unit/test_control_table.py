"""Control requests: where their paths stand; what engines are told, and what they read."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from miles_router.engines.actions import (
    MEMORY,
    Abort,
    AbortAll,
    Action,
    ChangeAdapter,
    Continue,
    EndGroup,
    Flush,
    NameVersion,
    Other,
    Pause,
    Sleep,
    Update,
    Wake,
)
from miles_router.engines.control import Arguments, BadArguments
from miles_router.engines.engine import Engine
from miles_router.engines.known import CONTROL, own_request
from miles_router.engines.sglang.engine import SGLANG
from miles_router.engines.sglang_jax.engine import WITH_ADAPTERS

TOLD = [
    *(Pause("retract"), Continue(), Abort("a"), AbortAll(), Flush(), NameVersion("2")),
    *(Sleep(MEMORY), Sleep({"weights"}), Wake(frozenset()), Wake({"kv_cache"})),
]


@pytest.mark.parametrize("engine", [SGLANG, WITH_ADAPTERS], ids=["usual", "jax"])
@pytest.mark.parametrize("action", TOLD, ids=lambda each: each.__class__.__name__)
def test_an_engine_is_told_what_a_client_may_tell_it(engine: Engine, action: Action) -> None:
    order = engine.order(action)
    path = order.target.decode()
    assert order.method in CONTROL[path].methods
    assert engine.read(path, Arguments(orjson.loads(order.body), {})) == action


@pytest.mark.parametrize(
    ("path", "fields", "action"),
    [
        ("/pause_generation", {}, Pause("abort")),
        ("/release_memory_occupation", {"tags": ["cuda_graph"]}, Sleep({"cuda_graph"})),
        ("/release_memory_occupation", {}, Sleep(MEMORY)),
        ("/resume_memory_occupation", {}, Wake(frozenset())),
        ("/abort_request", {"rid": "a", "abort_all": True}, AbortAll()),
        ("/abort_request", {"group": 3}, EndGroup(3)),
        ("/update_weight_version", {"new_version": "7"}, NameVersion("7", aborts=True)),
        ("/update_weights_from_disk", {"model_path": "m", "weight_version": 7}, Update("7", flushes=True)),
        ("/update_weights_from_disk", {"model_path": "m", "flush_cache": False}, Update(None)),
        ("/end_weight_update", {"weight_version": "7"}, Update("7")),
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}, ChangeAdapter("a", "/a", loads=True)),
        ("/unload_lora_adapter", {"lora_name": 1}, ChangeAdapter(None, loads=False)),
        ("/pause", {}, Pause("abort")),
        ("/abort_requests", {}, AbortAll()),
        ("/abort_requests", {"request_ids": ["chatcmpl-a"]}, Abort("a")),
        ("/finish_weight_update", {"weight_version": "7"}, Update("7")),
        ("/collective_rpc", {"method": "reload_weights"}, Update(None)),
        ("/collective_rpc", {"method": "ping"}, Other("/collective_rpc")),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}, ChangeAdapter("a", "/a", loads=True)),
        ("/freeze_gc", {}, Other("/freeze_gc")),
    ],
)
def test_a_control_request_is_read_as_what_it_means(path: str, fields: dict[str, Any], action: Action) -> None:
    assert CONTROL[path].read(Arguments(fields, {})) == action


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/pause_generation", {"mode": "now"}),
        ("/abort_request", {}),
        ("/abort_request", {"rid": 1}),
        ("/abort_request", {"group": "", "rid": "a"}),
        ("/abort_request", {"group": True}),
        ("/update_weight_version", {}),
        ("/update_weights_from_disk", {"model_path": 1}),
    ],
)
def test_arguments_that_no_engine_understands_are_refused(path: str, fields: dict[str, Any]) -> None:
    with pytest.raises(BadArguments):
        CONTROL[path].read(Arguments(fields, {}))


@pytest.mark.parametrize(
    ("path", "action"),
    [
        ("/update_weights_from_tensor", Update("7", flushes=True)),
        ("/load_lora_adapter_from_tensors", ChangeAdapter("a")),
        ("/set_internal_state", Other("/set_internal_state")),
    ],
)
def test_a_path_of_the_user_s_own_is_read_by_its_name(path: str, action: Action) -> None:
    assert own_request(path).read(Arguments({"weight_version": "7", "lora_name": "a"}, {})) == action
