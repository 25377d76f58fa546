"""What training frameworks expect, a file for each of them, and their Namespaces read in one place.

Imports nothing else of the router, so that every part of it can speak a dialect.
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

#: Their name -> ours. What is absent or None keeps our default; of several names of one setting the first counts.
NAMES = {**miles.NAMES, **slime.NAMES}
MIDDLEWARE_PATHS = (miles.MIDDLEWARE_PATHS, slime.MIDDLEWARE_PATHS)
#: Bounds that are 0 here where there is none, and None there.
BOUNDS = frozenset({"max_connections", "request_timeout"})
#: Names that begin so are about a router.
PREFIXES = (*miles.PREFIXES, slime.PREFIX)
OLD_PATHS = {**miles.OLD_PATHS, **slime.OLD_PATHS}


def settings_of(args: Namespace) -> dict[str, str]:
    """Our settings that a framework's Namespace names, as text.

    Raises:
        Unsupported: it names a setting of a router that is none of ours, with a value.
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
    """The middlewares that a Namespace lists, by the paths that ours have now."""
    listed = next((paths for name in MIDDLEWARE_PATHS if (paths := getattr(args, name, None))), ())
    return [_moved(path) for path in listed]


def _moved(path: str) -> str:
    return next((new + path[len(old) :] for old, new in OLD_PATHS.items() if path.startswith(old)), path)


def namespace_of(config: RouterConfig) -> Namespace:
    """The names under which such frameworks' own middlewares look settings up."""
    values = {theirs: getattr(config, ours) for theirs, ours in NAMES.items()}
    unbounded = {theirs: None for theirs, ours in NAMES.items() if ours in BOUNDS and not values[theirs]}
    paths = [spec.path for spec in config.middlewares]
    return Namespace(**{**values, **unbounded}, **dict.fromkeys(MIDDLEWARE_PATHS, paths))
