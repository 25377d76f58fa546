"""The door that each path has: who answers there, which key it takes, what a web page of somebody else may do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from starlette.routing import BaseRoute

from miles_router.asgi.headers import RawHeaders
from miles_router.asgi.keys import BEARER, X_API_KEY, Key, Keys

READING = frozenset({"GET", "HEAD"})
NOTHING: frozenset[str] = frozenset()


class Door(NamedTuple):
    """One of few: many paths share one."""

    #: The router and its middlewares answer by a route of their own; else the request goes through the stack.
    own: bool
    key: Key
    #: The methods that a page of another origin may use where no key is required; None: all.
    foreign: frozenset[str] | None


class Doors:
    """Finds the door of a path, by its decoded form alone.

    Args:
        opened: paths that need no key.
        administration: paths of the router's own; `{` begins a parameter.
        control: paths that go to every worker.
        routes: those of the middlewares.
        keys_of_layers: each gives the key that opens a path, beside the clients', or None.
        listed: paths that the clients' key opens; one that ends with `/` stands for all beneath it. Whatever is not
            listed needs the key of administration, known or not.
    """

    def __init__(
        self,
        keys: Keys,
        *,
        opened: Iterable[str],
        administration: Iterable[str],
        control: Iterable[str],
        routes: Iterable[BaseRoute],
        listed: Iterable[str],
        keys_of_layers: Iterable[Callable[[str], str | None]],
    ) -> None:
        self.keys = keys
        self._keys_of_layers = tuple(keys_of_layers)
        administered, listed, routes = tuple(administration), tuple(listed), tuple(routes)
        paths = [getattr(route, "path", "") for route in routes]
        patterns = [getattr(route, "path_regex", None) for route in routes]
        self._patterns = [pattern for pattern in patterns if pattern is not None]
        self._beneath = tuple(path for path in listed if path.endswith("/"))
        self._exact = {
            **dict.fromkeys(set(listed) - set(self._beneath), Door(False, keys.data, None)),
            **dict.fromkeys((path for path in paths if "{" not in path), Door(True, keys.data, READING)),
            **dict.fromkeys(administered, Door(True, keys.admin, READING)),
            **dict.fromkeys(control, Door(True, keys.admin, NOTHING)),
            **dict.fromkeys(opened, Door(True, keys.everybody, None)),
        }
        self._administered = {
            first_segment(path): Door(True, keys.admin, READING) for path in administered if "{" in path
        }
        self._answered = {first_segment(path) for path in paths}
        # By whether a middleware has routes in this segment, and whether the path is listed.
        self._others = {
            (True, True): Door(True, keys.data, READING),
            (False, True): Door(False, keys.data, None),
            (True, False): Door(True, keys.admin, NOTHING),
            (False, False): Door(False, keys.admin, NOTHING),
        }

    def enter(self, door: Door, path: str, headers: RawHeaders) -> RawHeaders:
        """Enter by the door of this path. As `Keys.enter`."""
        also = None
        if self._keys_of_layers and door.key is self.keys.data:
            found = [key for key_of in self._keys_of_layers if (key := key_of(path)) is not None]
            also = Key(*found) if found else None
        return self.keys.enter(door.key, headers, also)

    def is_shut(self, path: str, headers: RawHeaders) -> bool:
        """Whether nobody enters by the door of this path with these headers, whatever keys there are."""
        return self.of(path).key.required and not [name for name, _ in headers if name in (BEARER, X_API_KEY)]

    def of(self, path: str) -> Door:
        """The door of this path."""
        return self._exact.get(path) or self._by_part(path)

    def _by_part(self, path: str) -> Door:
        segment = first_segment(path)
        if segment in self._administered:
            return self._administered[segment]
        # With a slash at its end it is another path, which FastAPI redirects to the worker's own address.
        listed = not path.endswith("/") and (
            path.startswith(self._beneath) or bool([each for each in self._patterns if each.match(path)])
        )
        return self._others[segment in self._answered, listed]


def first_segment(path: str) -> str:
    """`/a/b` -> `/a`."""
    return "/" + path[1:].partition("/")[0]
