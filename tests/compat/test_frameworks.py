"""Training frameworks start the router with the Namespace they have, in a process of its own."""

from __future__ import annotations

import multiprocessing
from argparse import Namespace

import pytest

from miles_router.app import create_app
from miles_router.compat import config_from, run_router
from miles_router.errors import ConfigError
from miles_router.serving.server import listen
from miles_router.settings.config import RouterConfig
from tests.support.http import RawReply, ask
from tests.support.stage import staged


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


def test_names_that_are_absent_or_none_keep_our_defaults() -> None:
    assert config_from(Namespace(sglang_router_ip=None)) == RouterConfig()


def test_a_value_that_cannot_be_used_is_named() -> None:
    with pytest.raises(ConfigError, match=r"port: expected int, got 'x' \(from a framework's arguments\)"):
        config_from(namespace(sglang_router_port="x"))


def test_a_middleware_sees_the_frameworks_own_arguments() -> None:
    args = namespace()
    app = create_app(config_from(args), args=args)
    assert app.router.args is args
    assert vars(create_app(RouterConfig(hf_checkpoint="/m")).router.args)["hf_checkpoint"] == "/m"


async def test_run_router_serves_as_the_target_of_a_process() -> None:
    async with staged() as stage:
        worker = await stage.worker()
        with listen("127.0.0.1", 0) as free:
            port = free.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=run_router, args=(namespace(sglang_router_port=port),))
        process.start()
        try:
            url = f"http://127.0.0.1:{port}"
            assert (await _ready(url, process)).status == 200
            added = await ask(url, "POST", f"/add_worker?url={worker.url}")
            assert added.json()["worker_urls"] == {worker.url: 0}
            answer = await ask(url, "POST", "/generate", body=b"{}")
            assert (answer.status, answer.value("x-legacy")) == (200, b"2 bytes")
        finally:
            process.terminate()
            process.join(20)
        assert process.exitcode == 0


async def _ready(url: str, process: multiprocessing.process.BaseProcess) -> RawReply:
    import asyncio

    for _ in range(400):
        assert process.is_alive()
        try:
            return await ask(url, "GET", "/health")
        except OSError:
            await asyncio.sleep(0.05)
    raise AssertionError("the router does not answer")
