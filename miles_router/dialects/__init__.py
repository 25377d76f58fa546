"""The settings and names of training frameworks, a file for each of them, and the reader of their Namespaces.

This package imports nothing else of the router, so that every part of the router can use it.
"""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from miles_router.dialects import miles, slime
from miles_router.dialects.miles import Unsupported, replayed_rows, session_options, trainer_fields

if TYPE_CHECKING:
    from miles_router.settings.config import RouterConfig

__all__ = [
    "MIDDLEWARE_PATHS",
    "NAMES",
    "Unsupported",
    "middleware_paths",
    "namespace_of",
    "replayed_rows",
    "session_options",
    "settings_of",
    "trainer_fields",
]

#: Framework's name -> the router's setting. Absent or None keeps the default. The first name of a setting wins.
NAMES = {**miles.NAMES, **slime.NAMES}
MIDDLEWARE_PATHS = (miles.MIDDLEWARE_PATHS, slime.MIDDLEWARE_PATHS)
#: Settings for which 0 means "no limit" here, and None does in the frameworks.
BOUNDS = frozenset({"max_connections", "request_timeout"})
#: Prefixes of names that configure a router.
PREFIXES = (*miles.PREFIXES, slime.PREFIX)
OLD_PATHS = {**miles.OLD_PATHS, **slime.OLD_PATHS}


def settings_of(args: Namespace) -> dict[str, str]:
    """Return the router settings in a framework's Namespace, as text by setting name.

    Raises:
        Unsupported: the Namespace sets a router option that this router does not have.
    """
    miles.check_policy(args)
    known = {*NAMES, *MIDDLEWARE_PATHS, miles.POLICY}
    for name, value in vars(args).items():
        if name.startswith(PREFIXES) and name not in known and value not in (None, False, "", [], ()):
            raise Unsupported(f"{name}: no such setting; known are {', '.join(sorted(known))}")
    given: dict[str, str] = {}
    for theirs, ours in NAMES.items():
        value = getattr(args, theirs, None)
        if value is not None:
            given.setdefault(ours, str(value))
    return given


def middleware_paths(args: Namespace) -> list[str]:
    """Return the dotted paths of the middlewares in a Namespace; paths of framework modules become those of this
    router."""
    listed = next((paths for name in MIDDLEWARE_PATHS if (paths := getattr(args, name, None))), ())
    return [_moved(path) for path in listed]


def _moved(path: str) -> str:
    return next((new + path[len(old) :] for old, new in OLD_PATHS.items() if path.startswith(old)), path)


def namespace_of(config: RouterConfig) -> Namespace:
    """Return a Namespace with the names under which the frameworks' own middlewares look up settings."""
    values = {theirs: getattr(config, ours) for theirs, ours in NAMES.items()}
    unbounded = {theirs: None for theirs, ours in NAMES.items() if ours in BOUNDS and not values[theirs]}
    paths = [spec.path for spec in config.middlewares]
    return Namespace(**{**values, **unbounded}, **dict.fromkeys(MIDDLEWARE_PATHS, paths))
