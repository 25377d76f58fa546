"""Access rules by path: the handler, the required key, and the methods that web pages of other origins may use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from starlette.routing import BaseRoute

from miles_router.asgi.headers import RawHeaders
from miles_router.asgi.keys import BEARER, X_API_KEY, Key, Keys

READING = frozenset({"GET", "HEAD"})
NOTHING: frozenset[str] = frozenset()


class AccessRule(NamedTuple):
    """An access rule, shared by many paths."""

    #: True: a route of the router or of a middleware answers. False: the request goes through the middleware stack.
    own: bool
    key: Key
    #: The methods that a page of another origin may use when no key is required; None: all methods.
    cross_origin_methods: frozenset[str] | None


class AccessRules:
    """The access rules of all paths, looked up by the decoded path.

    Args:
        opened: paths that need no key.
        administration: the router's own paths; `{` begins a parameter.
        control: paths whose requests go to every worker.
        routes: the routes of the middlewares.
        keys_of_layers: functions that return an additional key accepted for a path, or None.
        listed: paths that need the client key; a path that ends with `/` includes all paths below it. Every path that
            is not listed needs the admin key, even if no route exists for it.
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
            **dict.fromkeys(set(listed) - set(self._beneath), AccessRule(False, keys.data, None)),
            **dict.fromkeys((path for path in paths if "{" not in path), AccessRule(True, keys.data, READING)),
            **dict.fromkeys(administered, AccessRule(True, keys.admin, READING)),
            **dict.fromkeys(control, AccessRule(True, keys.admin, NOTHING)),
            **dict.fromkeys(opened, AccessRule(True, keys.no_key, None)),
        }
        self._administered = {
            first_segment(path): AccessRule(True, keys.admin, READING) for path in administered if "{" in path
        }
        self._answered = {first_segment(path) for path in paths}
        # Keys: (a middleware has routes below this first segment, the path is listed).
        self._others = {
            (True, True): AccessRule(True, keys.data, READING),
            (False, True): AccessRule(False, keys.data, None),
            (True, False): AccessRule(True, keys.admin, NOTHING),
            (False, False): AccessRule(False, keys.admin, NOTHING),
        }

    def authorize(self, rule: AccessRule, path: str, headers: RawHeaders) -> RawHeaders:
        """Check the key of a request to `path`, and return the headers for layers and workers like `Keys.authorize`.

        Raises:
            Unauthorized: the path requires a key, and the request contains no valid one.
        """
        also = None
        if self._keys_of_layers and rule.key is self.keys.data:
            found = [key for key_of in self._keys_of_layers if (key := key_of(path)) is not None]
            also = Key(*found) if found else None
        return self.keys.authorize(rule.key, headers, also)

    def lacks_key(self, path: str, headers: RawHeaders) -> bool:
        """Return True if the path requires a key and the headers contain no key at all."""
        return self.of(path).key.required and not [name for name, _ in headers if name in (BEARER, X_API_KEY)]

    def of(self, path: str) -> AccessRule:
        return self._exact.get(path) or self._by_part(path)

    def _by_part(self, path: str) -> AccessRule:
        segment = first_segment(path)
        if segment in self._administered:
            return self._administered[segment]
        # With a trailing slash it is a different path: FastAPI would redirect the client to the worker's own address.
        listed = (path.startswith(self._beneath) and not path.endswith("/")) or bool(
            [each for each in self._patterns if each.match(path)]
        )
        return self._others[segment in self._answered, listed]


def first_segment(path: str) -> str:
    """Return the first segment with its slash: `/a` for `/a/b`."""
    return "/" + path[1:].partition("/")[0]
