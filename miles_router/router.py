"""What a middleware may see of the router. Everything here is public; everything else is not."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson

from miles_router.config import RouterConfig
from miles_router.control import Control
from miles_router.errors import ConfigError
from miles_router.exchange import request_id
from miles_router.experts import Experts
from miles_router.forwarding import Forwarded, Forwarder, Outgoing
from miles_router.gate import Gate
from miles_router.headers import REQUEST_DROPPED, RawHeaders, end_to_end
from miles_router.metrics import Metrics
from miles_router.workers import WorkerPool


class Router:
    """The handle each middleware gets as `router=`.

    An ordinary object on purpose: middlewares written for other routers of this shape set attributes of their own.
    """

    def __init__(
        self,
        *,
        config: RouterConfig,
        pool: WorkerPool,
        forwarder: Forwarder,
        metrics: Metrics,
        gate: Gate,
        control: Control,
        args: Namespace | None,
    ) -> None:
        self.config = config
        self.pool = pool
        self.metrics = metrics
        #: Whether the fleet is paused or asleep, and who waits.
        self.gate = gate
        #: Requests to every worker at once.
        self.control = control
        #: Free for middlewares to leave each other things that last longer than a request.
        self.state = SimpleNamespace()
        #: The argparse Namespace of the framework that embeds us, or one with the names such frameworks use.
        self.args = args if args is not None else legacy_args(config)
        #: What middlewares show under `statistics` in `GET /router/info`: a name and a function that gives JSON.
        self.statistics: dict[str, Callable[[], Mapping[str, object]]] = {}
        #: Where layers that hold trajectories and the layer that captures routed experts find each other.
        self.experts = Experts()
        self._forwarder = forwarder

    @asynccontextmanager
    async def forward(
        self,
        method: str,
        path: str,
        *,
        headers: RawHeaders | None = None,
        body: bytes = b"",
        key: str | None = None,
    ) -> AsyncIterator[Forwarded]:
        """A request of a middleware's own to a worker, chosen, leased and retried like a client's.

            async with router.forward("POST", "/generate", headers=[(b"content-type", b"application/json")],
                                      body=orjson.dumps(payload), key=session_id) as forwarded:
                status, text = forwarded.reply.status, await forwarded.reply.read_all(limit)

        `path` is sent as it is spelled, query included. Leaving the block early tells the worker to stop generating.

        Raises:
            NoWorkerAvailable, UpstreamError: as for a client's request.
        """
        sent = end_to_end(headers or [], REQUEST_DROPPED)
        if not any(name == b"x-request-id" for name, _ in sent):
            sent.append((b"x-request-id", request_id({}).encode("ascii")))
        forwarded = await self._forwarder.open(Outgoing(method, path.encode("ascii"), sent, body, key))
        try:
            yield forwarded
        finally:
            forwarded.close()

    @functools.cached_property
    def model_config(self) -> Mapping[str, Any]:
        """The model's `config.json`, of `--hf-checkpoint`; empty where that has none, or is not set.

        Raises:
            ConfigError: it cannot be read.
        """
        return load_model_config(self.config)

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of `--hf-checkpoint` (transformers), loaded at the first use.

        Raises:
            ConfigError: no checkpoint is set, the extra `tito` is not installed, or it cannot be loaded.
        """
        return load_tokenizer(self.config)


def load_model_config(config: RouterConfig) -> Mapping[str, Any]:
    """`config.json` of `--hf-checkpoint`; nothing where there is none."""
    if config.hf_checkpoint is None:
        return {}
    try:
        found = orjson.loads(Path(config.hf_checkpoint, "config.json").read_bytes())
    except FileNotFoundError:
        return _from_hub(config.hf_checkpoint)
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"hf_checkpoint: cannot read config.json of {config.hf_checkpoint!r}: {error}") from None
    return found if isinstance(found, dict) else {}


def _from_hub(checkpoint: str) -> Mapping[str, Any]:
    """Of a checkpoint that is no directory; nothing without the extra `tito`, or where the hub has none."""
    try:
        from transformers import PretrainedConfig
    except ImportError:
        return {}
    try:
        found: Mapping[str, Any] = PretrainedConfig.get_config_dict(checkpoint)[0]
    except (OSError, ValueError):
        return {}
    return found


def load_tokenizer(config: RouterConfig) -> Any:
    """Load `--hf-checkpoint`'s tokenizer, with `--chat-template-path` in place of its own template."""
    if config.hf_checkpoint is None:
        raise ConfigError("hf_checkpoint: a middleware needs the model's tokenizer; set --hf-checkpoint")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError("hf_checkpoint: needs transformers; pip install 'miles-router[tito]'") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.hf_checkpoint)
        if config.chat_template_path is not None:
            with open(config.chat_template_path, encoding="utf-8") as template:
                tokenizer.chat_template = template.read()
    except (OSError, ValueError) as error:
        raise ConfigError(f"hf_checkpoint: cannot load a tokenizer from {config.hf_checkpoint!r}: {error}") from None
    return tokenizer


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
