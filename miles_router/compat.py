"""How training frameworks start us: `run_router(args)` with the Namespace they already have."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable

from miles_router import log
from miles_router.dialects import MIDDLEWARE_PATHS, settings_of
from miles_router.errors import ConfigError
from miles_router.settings.config import MiddlewareSpec, RouterConfig, load


def run_router(args: Namespace | RouterConfig) -> None:
    """Start a router and serve until SIGTERM. Safe as the target of a `multiprocessing.Process`.

    Args:
        args: a `RouterConfig`, or the argparse Namespace of a training framework with the names in `dialects.NAMES`;
            everything else in it is left alone and reaches middlewares as `router.args`.

    Raises:
        ConfigError: a setting that cannot be used.
    """
    if isinstance(args, RouterConfig):
        run(args)
    else:
        run(config_from(args), args)


def config_from(args: Namespace) -> RouterConfig:
    """Our settings out of a framework's Namespace.

    Raises:
        ConfigError: a value that cannot be used, named as the framework names it.
    """
    values = settings_of(args)
    paths: Iterable[str] = getattr(args, MIDDLEWARE_PATHS, None) or ()
    try:
        loaded = load(values, {}, ()).config
    except ConfigError as error:
        raise ConfigError(f"{error} (from a framework's arguments)") from None
    if not paths:
        return loaded
    given = {name: getattr(loaded, name) for name in values}
    return RouterConfig(**given, middlewares=tuple(MiddlewareSpec(path) for path in paths))


def run(config: RouterConfig, args: Namespace | None = None) -> None:
    """Configure logging, build the app and serve it."""
    log.configure(config.log_level, config.log_format)
    from miles_router.app import create_app
    from miles_router.serving.server import serve

    try:
        serve(create_app(config, args=args))
    finally:
        log.flush()  # a process that a framework has started runs nothing at its exit
