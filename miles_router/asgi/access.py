"""Access to the router: the keys of clients and administrators, web pages of other origins, and the rules of all paths.

Keys are compared in constant time. No I/O.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from miles_router.asgi.wire import RawHeaders, first_header
from miles_router.errors import BadRequest, ForeignOrigin, Unauthorized

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

#: `host[:port]` (RFC 9110 section 7.2), without user information and escapes.
AUTHORITY = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,253})|\[[0-9A-Fa-f:.]{2,45}\])(:([0-9]{1,5}))?")
MAX_PORT = 65535
DEFAULT_PORTS = {"http": ":80", "https": ":443"}
#: Values of `Sec-Fetch-Site` for requests from pages of other origins (W3C Fetch Metadata).
FROM_ELSEWHERE = frozenset({b"cross-site", b"same-site"})


def base_url(scope: Mapping[str, Any], public_url: str | None) -> str:
    """Return the router's address for this client, without a trailing slash.

    It is `public_url` if set, else built from the `Host` header, else from the connection.

    Raises:
        BadRequest: `Host` is not `host[:port]`. A wrong address would send the agent to another server.
    """
    if public_url is not None:
        return public_url.rstrip("/")
    host = first_header(scope["headers"], b"host")
    if host:
        authority = host.decode("latin-1")
        if not _is_authority(authority):
            raise BadRequest("the Host header must be a host and an optional port; or set --public-url")
        return f"{scope['scheme']}://{authority}"
    address, port = scope["server"]
    return f"{scope['scheme']}://{f'[{address}]' if ':' in address else address}:{port}"


def check_origin(scope: Mapping[str, Any], allowed: Collection[str], public_url: str | None) -> None:
    """Restrict web pages of other origins to the `allowed` methods. Call it where no key is required.

    A browser sends the requests of any page, also to a local router, and only marks their origin in headers.

    Raises:
        ForeignOrigin: a page of another origin uses another method.
    """
    if scope["method"] in allowed:
        return
    origin_headers = [pair for pair in scope["headers"] if pair[0] == b"origin" or pair[0] == b"sec-fetch-site"]
    if not origin_headers:
        return
    ours = {_authority(f"http://{value.decode('latin-1')}") for name, value in scope["headers"] if name == b"host"}
    if public_url is not None:
        ours.add(_authority(public_url))
    for name, value in origin_headers:
        foreign = _authority(value.decode("latin-1")) not in ours if name == b"origin" else value in FROM_ELSEWHERE
        if foreign:
            raise ForeignOrigin("a web page of another origin may not do this while the router has no API key")


def _is_authority(text: str) -> bool:
    match = AUTHORITY.fullmatch(text)
    return match is not None and (match[4] is None or 0 < int(match[4]) <= MAX_PORT)


def _authority(url: str) -> str:
    """Return host and port of a URL; the scheme's default port is left out."""
    scheme, _, rest = url.lower().partition("://")
    return rest.partition("/")[0].removesuffix(DEFAULT_PORTS.get(scheme, ":"))


#: The headers that contain a key: OpenAI and SGLang use `Authorization`, Anthropic uses `X-Api-Key`.
BEARER, X_API_KEY = b"authorization", b"x-api-key"
#: Prefix of the headers with which SGLang's own gateway overrides ids, ranks, priority and hosts (SGLang 0.5.23).
OVERRIDE = b"x-override-"


class Key:
    """A set of accepted keys for one part of the router. Without any, the part needs no key."""

    __slots__ = ("_accepted", "name", "required")

    def __init__(self, *accepted: str, name: str = "api key") -> None:
        self.required = bool(accepted)
        self.name = name
        self._accepted = [each.encode("ascii") for each in accepted]

    def matches(self, credential: bytes) -> bool:
        """Return True if `credential` is an accepted key."""
        # A list, not `any`: every key is compared, so the time does not show which one matched.
        return True in [hmac.compare_digest(credential, each) for each in self._accepted]


class Keys:
    """The client keys and admin keys of one router.

    Without admin keys, the client keys are also the admin keys. So administration is never more open than the data
    plane.
    """

    def __init__(self, data: Iterable[str] = (), admin: Iterable[str] = ()) -> None:
        own = tuple(admin)
        self.data = Key(*data)
        self.admin = Key(*own, name="admin key") if own else self.data
        self.no_key = Key()

    def authorize(self, key: Key, headers: RawHeaders, also: Key | None = None) -> RawHeaders:
        """Check the request's keys against `key`, and return the headers for layers and workers.

        The returned headers contain none of the router's keys. They contain `x-override-*` headers only if the request
        has a valid admin key.

        Args:
            also: further keys that are accepted for this path.

        Raises:
            Unauthorized: a key is required, and the request contains no valid one.
        """
        administers = False
        if self.admin.required or also is not None:
            entered, ours = not key.required, []
            for pair in [pair for pair in headers if pair[0] == BEARER or pair[0] == X_API_KEY]:
                credential = _credential(*pair)
                by_data, by_admin = self.data.matches(credential), self.admin.matches(credential)
                by_own = also is not None and also.matches(credential)
                if by_data or by_admin or by_own:
                    ours.append(pair)
                administers = administers or by_admin
                entered = entered or by_own or (by_admin if key is self.admin else by_data)
            if not entered:
                raise Unauthorized(f"a valid {key.name} is required: Authorization: Bearer KEY")
            if ours:
                headers = [pair for pair in headers if pair not in ours]
        for name, _ in () if administers else headers:
            if name.startswith(OVERRIDE):
                return [pair for pair in headers if not pair[0].startswith(OVERRIDE)]
        return headers


def _credential(name: bytes, value: bytes) -> bytes:
    """Return the credential in a header's value, or b""."""
    if name == X_API_KEY:
        return value
    scheme, _, credential = value.partition(b" ")
    return credential.strip() if scheme.lower() == b"bearer" else b""


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
