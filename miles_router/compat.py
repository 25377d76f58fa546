"""Entry points for training frameworks, called with the framework's own Namespace: `run_router(args)`, and
`run_session_server(args, url)`, which serves sessions in front of another router.

    rollout code ──► session server (sessions, no workers of its own) ──► url: any router ──► workers
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from miles_router import log
from miles_router.dialects import Unsupported, middleware_paths, replayed_rows, session_options, settings_of
from miles_router.dialects.miles import SESSION_HOST, SESSION_PORT
from miles_router.errors import ConfigError
from miles_router.fleet.pool import NEVER
from miles_router.settings.config import MiddlewareSpec, RouterConfig, load

SESSIONS = "middleware_hub.openai_session_middleware.OpenAISessionMiddleware"
EXPERTS = "middleware_hub.routed_experts_middleware.RoutedExpertsMiddleware"
POSITIONS = "middleware_hub.indexer_topk_middleware.IndexerTopkMiddleware"
#: The middleware that keeps each kind of rows for the samples.
KEEPERS = {"routed_experts": EXPERTS, "indexer_topk": POSITIONS}


def run_router(args: Namespace | RouterConfig) -> None:
    """Start a router and serve until SIGTERM. Safe as the target of a `multiprocessing.Process`.

    Args:
        args: a `RouterConfig`, or the argparse Namespace of a training framework with the names in `dialects.NAMES`.
            Middlewares get the whole Namespace, with all other names, as `router.args`.

    Raises:
        ConfigError: a setting is invalid.
    """
    if isinstance(args, RouterConfig):
        run(args)
    else:
        run(config_from(args), args)


def run_session_server(args: Namespace, backend_url: str) -> None:
    """Serve sessions in front of another router until SIGTERM. Safe as the target of a `multiprocessing.Process`.

    Args:
        args: the argparse Namespace of a training framework. The server listens at its `session_server_ip` and
            `session_server_port`.
        backend_url: the URL of the router that receives the requests.

    Raises:
        ConfigError: a setting is invalid.
    """
    run(session_config_from(args, backend_url), args)


def config_from(args: Namespace) -> RouterConfig:
    """Convert the Namespace of a training framework to the router's settings.

    Raises:
        ConfigError: a value is invalid, or the router does not support an option. The message uses the framework's
            name of the option.
    """
    try:
        settings: Mapping[str, Any] = settings_of(args)
        paths = middleware_paths(args)
        sessions = session_options(args) if SESSIONS in paths else {}
    except Unsupported as error:
        raise ConfigError(str(error)) from None
    for name, kind in replayed_rows(args).items():
        if SESSIONS in paths and KEEPERS[kind] not in paths:
            raise ConfigError(f"{name}: add {KEEPERS[kind]} after {SESSIONS}; samples of sessions need its rows")
    return _config(settings, [MiddlewareSpec(path, sessions if path == SESSIONS else {}) for path in paths])


def session_config_from(args: Namespace, backend_url: str) -> RouterConfig:
    """Return the settings of a session server in front of the router at `backend_url`.

    Raises:
        ConfigError: like `config_from`, or `session_server_port` is not a single port.
    """
    host, port = getattr(args, SESSION_HOST, None), getattr(args, SESSION_PORT, None)
    if isinstance(port, (list, tuple)) and len(port) == 1:
        port = port[0]
    if type(port) is not int:
        raise ConfigError(f"{SESSION_PORT}: a session server listens on one port, not {port!r}")
    try:
        given = settings_of(args)
        options = {**session_options(args), "whole_answers": True}
    except Unsupported as error:
        raise ConfigError(str(error)) from None
    settings = {
        **given,
        "host": str(host) if host is not None else given.get("host", RouterConfig.host),
        "port": str(port),
        "worker_urls": backend_url,
        # The router behind a session server is its only worker, so quarantining it would only stop all requests.
        # It checks the health of its own workers.
        "health_check_failure_threshold": str(NEVER),
        "deep_health_check_interval": "0",
    }
    keepers = [MiddlewareSpec(KEEPERS[kind]) for kind in replayed_rows(args).values()]
    return _config(settings, [MiddlewareSpec(SESSIONS, options), *keepers])


def _config(settings: Mapping[str, Any], middlewares: list[MiddlewareSpec]) -> RouterConfig:
    try:
        loaded = load(settings, {}, ()).config
    except ConfigError as error:
        raise ConfigError(f"{error} (from a framework's arguments)") from None
    given = {name: getattr(loaded, name) for name in settings}
    return RouterConfig(**given, middlewares=tuple(middlewares))


def run(config: RouterConfig, args: Namespace | None = None) -> None:
    """Configure logging, build the app and serve until SIGTERM, in several processes if `config` asks for them."""
    log.configure(config.log_level, config.log_format)
    try:
        if config.processes > 1:
            from miles_router.serving.supervisor import supervise

            supervise(config, args)
        else:
            from miles_router.app import create_app
            from miles_router.serving.server import serve

            serve(create_app(config, args=args))
    finally:
        log.flush()  # a `multiprocessing.Process` runs no atexit handlers, so nothing else writes the queued lines
