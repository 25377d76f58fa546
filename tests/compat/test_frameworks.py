"""Training frameworks start the router with the Namespace they have, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Mapping

import aiohttp
import pytest

from miles_router.app import create_app
from miles_router.client import RouterClient
from miles_router.compat import (
    EXPERTS,
    POSITIONS,
    SESSIONS,
    config_from,
    run_router,
    run_session_server,
    session_config_from,
)
from miles_router.errors import ConfigError
from miles_router.settings.config import RouterConfig
from miles_router.testing import SimulatedWorker
from miles_router.trajectory.rows import KINDS
from tests.compat.miles_client import MilesSession
from tests.support.cache_trial import checkpoint
from tests.support.http import RawReply, ask
from tests.support.ports import free_ports
from tests.support.running_router import refuses
from tests.support.stage import staged
from tests.support.waiting import PATIENCE, until


def namespace(**changes: object) -> Namespace:
    """What miles and slime pass, and a little of the much else they have."""
    names = {
        "sglang_router_ip": "127.0.0.1",
        "sglang_router_port": 31007,
        "miles_router_middleware_paths": ["tests.support.plugins.working.Legacy"],
        "rollout_health_check_interval": 30.0,
        "miles_router_health_check_failure_threshold": 5,
        "miles_router_max_connections": 4096,
        "miles_router_timeout": None,
        "hf_checkpoint": "/models/qwen3",
        "use_critic": False,
    }
    return Namespace(**{**names, **changes})


def test_every_name_a_framework_uses_is_understood() -> None:
    config = config_from(namespace(miles_router_timeout=7200))
    assert (config.host, config.port, config.hf_checkpoint) == ("127.0.0.1", 31007, "/models/qwen3")
    assert (config.health_check_interval, config.health_check_failure_threshold) == (30.0, 5)
    assert (config.max_connections, config.request_timeout) == (4096, 7200.0)
    assert [spec.path for spec in config.middlewares] == ["tests.support.plugins.working.Legacy"]


def test_a_value_that_cannot_be_used_is_named() -> None:
    with pytest.raises(ConfigError, match=r"port: expected int, got 'x' \(from a framework's arguments\)"):
        config_from(namespace(sglang_router_port="x"))


def test_a_middleware_sees_the_frameworks_own_arguments() -> None:
    args = namespace()
    app = create_app(config_from(args), args=args)
    assert app.router.args is args
    assert vars(create_app(RouterConfig(hf_checkpoint="/m")).router.args)["hf_checkpoint"] == "/m"


# Names that must not be ignored


@pytest.mark.parametrize("whose", ["miles", "slime"])
def test_a_framework_names_its_routers_settings_after_itself(whose: str) -> None:
    args = Namespace(
        **{
            f"{whose}_router_timeout": 60,
            f"{whose}_router_max_connections": 12,
            f"{whose}_router_health_check_failure_threshold": 7,
            f"{whose}_router_middleware_paths": ["tests.support.plugins.working.Legacy"],
        }
    )
    config = config_from(args)
    assert (config.request_timeout, config.max_connections, config.health_check_failure_threshold) == (60.0, 12, 7)
    assert [spec.path for spec in config.middlewares] == ["tests.support.plugins.working.Legacy"]


@pytest.mark.parametrize("name", ["slime_router_retries", "miles_router_cache_size", "sglang_router_mini_lb"])
def test_a_setting_of_a_router_that_is_none_of_ours_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: no such setting; known are .*miles_router_timeout"):
        config_from(namespace(**{name: 3}))
    for nothing in (None, False, ""):
        config_from(namespace(**{name: nothing}))


def test_a_policy_that_is_not_ours_is_refused_and_one_that_ties_keys_is_taken() -> None:
    for policy in (None, "manual", "consistent_hashing"):
        config_from(namespace(sglang_router_policy=policy))
    with pytest.raises(ConfigError, match=r"^sglang_router_policy: 'cache_aware' is not supported"):
        config_from(namespace(sglang_router_policy="cache_aware"))


@pytest.mark.parametrize("whose", ["miles", "slime"])
def test_the_paths_where_middlewares_once_stood_are_ours(whose: str) -> None:
    old = f"{whose}.router.middleware_hub.radix_tree_middleware.RadixTreeMiddleware"
    config = config_from(namespace(miles_router_middleware_paths=[old]))
    assert [spec.path for spec in config.middlewares] == ["middleware_hub.radix_tree_middleware.RadixTreeMiddleware"]
    create_app(RouterConfig(middlewares=config.middlewares, hf_checkpoint=checkpoint()))


def sessions(**changes: object) -> Mapping[str, object]:
    """The options of the session middleware that a Namespace with it means."""
    (spec,) = config_from(namespace(miles_router_middleware_paths=[SESSIONS], **changes)).middlewares
    return spec.options


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"tito_model": "qwen3"}, {"tito_model": "qwen3"}),
        ({"tito_model": "default"}, {}),
        (
            {"apply_chat_template_kwargs": {"enable_thinking": False}},
            {"chat_template_kwargs": {"enable_thinking": False}},
        ),
        ({"apply_chat_template_kwargs": {}}, {}),
        ({"lora_rank": 32}, {"lora_path": "miles_lora"}),
        ({"lora_rank": 0, "lora_adapter_path": "/adapter"}, {"lora_path": "miles_lora"}),
        ({"lora_rank": 32, "lora_train_only": True}, {}),
        ({"session_message_matcher": "strict"}, {"message_equality": "strict"}),
        ({"session_message_matcher": "loose_tool_call"}, {"message_equality": "tool-arguments-as-json"}),
        ({"session_message_matcher": "my.matcher"}, {"message_equality": "my.matcher"}),
        ({"use_session_server": "v2"}, {"default_branches": "drop-superseded"}),
        ({"use_session_server": True}, {}),
        (
            {"session_sample_picker_path": "miles.rollout.session.v2.picker_hub.drop_retries"},
            {},
        ),
    ],
    ids=str,
)
def test_what_a_run_says_of_sessions_takes_effect(given: dict[str, object], meant: dict[str, object]) -> None:
    assert {"message_equality": "strict", **sessions(**given)} == {"message_equality": "strict", **meant}


@pytest.mark.parametrize(
    "given",
    [
        {"session_sample_picker_path": "my.picker"},
        {"session_sample_postprocessor_path": "my.postprocessor"},
        {"session_message_matcher": "role_content_only"},
        {"use_rollout_indexer_replay": True},
        {"use_rollout_routing_replay": True},
    ],
    ids=str,
)
def test_what_sessions_do_not_do_is_refused_by_name(given: dict[str, object]) -> None:
    (name,) = given
    with pytest.raises(ConfigError, match=f"^{name}: "):
        sessions(**given)
    config_from(namespace(**given))  # a router without sessions has nothing to do with it


def test_options_of_a_run_fit_the_middleware() -> None:
    args = namespace(
        miles_router_middleware_paths=[SESSIONS, EXPERTS, POSITIONS],
        hf_checkpoint=checkpoint(),
        apply_chat_template_kwargs={"enable_thinking": False},
        lora_rank=8,
        use_session_server="v2",
        use_rollout_routing_replay=True,
        use_rollout_indexer_replay=True,
    )
    rows = create_app(config_from(args), args=args).router.rows
    assert [kind.name for kind in KINDS if rows[kind].captures] == ["routed_experts", "indexer_topk"]


@pytest.mark.parametrize("port", [None, [5000, 5004], "5000"])
def test_a_session_server_wants_one_port(port: object) -> None:
    args = namespace(session_server_ip="127.0.0.1", session_server_port=port)
    with pytest.raises(ConfigError, match=r"^session_server_port: "):
        session_config_from(args, "http://127.0.0.1:1")


def test_a_session_server_has_the_settings_of_the_run() -> None:
    args = namespace(session_server_port=[5000], use_rollout_routing_replay=True, tito_model="qwen3", lora_rank=8)
    config = session_config_from(args, "http://[::1]:31000")
    assert (config.host, config.port, config.worker_urls) == ("127.0.0.1", 5000, ("http://[::1]:31000",))
    assert [spec.path for spec in config.middlewares] == [SESSIONS, EXPERTS]
    args.use_rollout_indexer_replay = True
    both = session_config_from(args, "http://[::1]:31000").middlewares
    assert [spec.path for spec in both] == [SESSIONS, EXPERTS, POSITIONS]
    assert config.middlewares[0].options == {
        "tito_model": "qwen3",
        "lora_path": "miles_lora",
        "message_equality": "strict",
        "whole_answers": True,
    }


# Processes


@contextlib.asynccontextmanager
async def running(target: Callable[..., None], url: str, *args: object) -> AsyncIterator[None]:
    """A server as a framework starts it."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=args)
    process.start()
    try:
        assert (await _ready(url, process)).status == 200
        yield
    finally:
        process.terminate()
        process.join(PATIENCE)
    assert process.exitcode == 0


async def test_run_router_serves_as_the_target_of_a_process() -> None:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    async with staged() as stage, running(run_router, url, namespace(sglang_router_port=port)):
        worker = await stage.worker()
        added = await ask(url, "POST", f"/add_worker?url={worker.url}")
        assert added.json()["worker_urls"] == {worker.url: 0}
        answer = await ask(url, "POST", "/generate", body=b"{}")
        assert (answer.status, answer.value("x-legacy")) == (200, b"2 bytes")


async def test_a_session_server_stands_in_front_of_another_router_over_ipv6() -> None:
    """Both are processes of their own, told addresses as miles writes them; and the run dumps its trajectories, for
    which it wants the messages of its samples."""
    ports = free_ports(2)
    router, sessions = (f"http://[::1]:{port}" for port in ports)
    args = namespace(
        sglang_router_ip="[::1]",
        sglang_router_port=ports[0],
        miles_router_middleware_paths=[],
        hf_checkpoint=checkpoint(),
        session_server_ip="[::1]",
        session_server_port=ports[1],
        save_debug_trajectory_data="/dump/{rollout_id}.jsonl",
    )
    async with (
        SimulatedWorker(tokenizer=checkpoint(), weight_version="1") as worker,
        running(run_router, router, args),
        running(run_session_server, sessions, args, router),
        aiohttp.ClientSession() as http,
        RouterClient(sessions) as ours,
    ):
        await ask(router, "POST", f"/add_worker?url={worker.url}")
        session = await MilesSession.create(http, sessions)
        first = await session.chat([{"role": "user", "content": "Hi"}], max_tokens=4)
        history = [{"role": "user", "content": "Hi"}, first["choices"][0]["message"], {"role": "user", "content": "Go"}]
        answer = await ask(
            sessions,
            "POST",
            f"/sessions/{session.id}/v1/chat/completions",
            [("Content-Type", "application/json")],
            json.dumps({"model": "m", "messages": history, "max_tokens": 4, "stream": True}).encode(),
        )
        assert answer.body.endswith(b"data: [DONE]\n\n")
        asked = worker.log.at("/v1/chat/completions")
        assert [dict(each.headers)[b"x-smg-routing-key"] for each in asked] == [session.id.encode()] * 2
        assert not any(each.json().get("stream") for each in asked), "whole answers say their versions"
        records = (await ask(sessions, "GET", f"/sessions/{session.id}")).json()["records"]
        (own,) = await ours.session(session.id).collect()
        (sample,) = (await session.collect()).samples
        generations = [generation for each in asked for generation in each.generations]
        assert sample.tokens == own.tokens.tolist() == generations[1].input_ids + generations[1].output_ids
        assert sample.weight_versions == ["1", "1"]
        assert sample.metadata["messages"] == [*history, records[1]["response"]["choices"][0]["message"]]


async def _ready(url: str, process: multiprocessing.process.BaseProcess) -> RawReply:
    await until(lambda: not refuses(url) or not process.is_alive(), "it listens")
    assert process.is_alive()
    return await ask(url, "GET", "/health")
