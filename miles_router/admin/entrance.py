"""The entrance of one model's requests: the routes of the router and of the model's middlewares, and their keys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import chain

from starlette.routing import BaseRoute, Route, WebSocketRoute

from miles_router.admin.control import ControlRoutes
from miles_router.admin.routes import Admin
from miles_router.asgi.access import AccessRules, Keys, first_segment
from miles_router.asgi.exchange import Receive, Scope, Send
from miles_router.asgi.own_routes import OwnRoutes
from miles_router.engines.known import CLIENT_PATHS
from miles_router.errors import ConfigError, MethodNotAllowed
from miles_router.middlewares.contract import (
    ASGIApp,
    HasAdminRoutes,
    HasDataPaths,
    HasKeys,
    HasOpenRoutes,
    HasRoutes,
)
from miles_router.settings.config import RouterConfig, paths_problem
from miles_router.settings.keys import admin_keys, data_keys

#: The beginning of paths that a middleware may have opened by the administration key.
ADMIN_PREFIX = "/router/"


@dataclass(frozen=True)
class Entrance:
    """The entrance of one model.

    Attributes:
        layers: the model's middlewares, outermost first.
    """

    routes: OwnRoutes
    access_rules: AccessRules
    layers: Sequence[ASGIApp]

    @classmethod
    def build(
        cls,
        config: RouterConfig,
        answered: Callable[[Sequence[BaseRoute]], Sequence[BaseRoute]],
        admin: Admin,
        control_routes: ControlRoutes,
        layers: Sequence[ASGIApp],
        reach: Route,
        stack: ASGIApp,
    ) -> Entrance:
        """Build the entrance to `layers`; requests without a route of their own go to `stack`.

        Args:
            answered: returns the router's own routes as this process answers them.
            reach: the route that tests how clients reach the router.

        Raises:
            ConfigError: `fan_out` or `data_paths` contains a path of the router.
            ConfigError: a middleware's route or data path is invalid, or collides with a path of the router.
        """
        own = (*admin.open_routes(), *admin.guarded_routes())
        added = [route for layer in layers if isinstance(layer, HasOpenRoutes) for route in layer.open_routes()]
        guarded = [route for layer in layers if isinstance(layer, HasAdminRoutes) for route in layer.admin_routes()]
        extra = [route for layer in layers if isinstance(layer, HasRoutes) for route in layer.routes()]
        groups = [
            [*admin.open_routes(), *added],
            [*answered(admin.guarded_routes()), *guarded],  # the process that gets a request answers a middleware's
            answered(control_routes.routes()),
        ]
        opened, administration, control = ([_path(route) for route in group] for group in groups)
        layered = [path for layer in layers if isinstance(layer, HasDataPaths) for path in layer.data_paths()]
        # A str in place of a list would yield its characters as paths, and "/" would open every path to client keys.
        if problem := paths_problem(layered):
            raise ConfigError(f"a middleware's data_paths: {problem}")
        for name, paths, others in (
            ("fan_out", config.fan_out, {*opened, *administration}),
            ("data_paths", config.data_paths, {*opened, *administration, *control}),
            ("a middleware's data_paths", layered, {*opened, *administration, *control}),
        ):
            if twice := others & {*paths}:
                raise ConfigError(f"{name}: {min(twice)} is a path of the router's own")
        _check_routes(added, guarded, extra, own={*map(_path, own), _path(reach)}, control={*control})
        access_rules = AccessRules(
            Keys(data_keys(config), admin_keys(config)),
            opened=opened,
            administration=administration,
            control=control,
            routes=(*extra, reach),
            listed=(*CLIENT_PATHS, *config.data_paths, *layered),
            keys_of_layers=[layer.key_of for layer in layers if isinstance(layer, HasKeys)],
        )
        fences, layers_own = _fences(chain(*groups)), _fences((*extra, reach))
        routes = OwnRoutes((*chain(*groups), *fences, *extra, reach, *layers_own), default=stack)
        return cls(routes, access_rules, layers)


def _check_routes(
    added: Sequence[BaseRoute],
    guarded: Sequence[BaseRoute],
    extra: Sequence[BaseRoute],
    *,
    own: Collection[str],
    control: Set[str],
) -> None:
    """Check the middlewares' routes against the router's own paths and the control paths.

    Args:
        added: the routes that need no key.
        guarded: the routes that need the administration key.
        extra: the routes that need the clients' key.

    Raises:
        ConfigError: a route is invalid, or collides with another path.
    """
    for route in (*added, *guarded):
        if not isinstance(route, Route):  # the access rules know the paths of such routes alone
            raise ConfigError(f"a middleware's open or admin route {_path(route)!r} must be a Route of one path")
    for route in added:
        if "{" in _path(route):
            raise ConfigError(f"a middleware's open route {_path(route)!r} must have no parameters")
    for route in guarded:
        if not _path(route).startswith(ADMIN_PREFIX) or _path(route) in own:
            raise ConfigError(
                f"a middleware's admin route {_path(route)!r} must begin with {ADMIN_PREFIX} "
                "and differ from the router's own paths"
            )
    taken = {*map(first_segment, own), *control}
    for routes in (added, extra):
        segments = [_fixed_segment(route) for route in routes]
        if twice := taken & {*segments} or control & {*map(_path, routes)}:
            raise ConfigError(f"a middleware has a route under {min(twice)!r}, which is a path of the router's own")
        taken |= {*segments}


def _fences(routes: Iterable[BaseRoute]) -> list[Route]:
    methods: dict[str, set[str]] = {}
    for route in routes:
        if isinstance(route, Route):
            methods.setdefault(route.path, set()).update(route.methods or ())
    return [Route(path, _WrongMethod(allowed)) for path, allowed in methods.items()]


def _path(route: BaseRoute) -> str:
    path = getattr(route, "path", None)
    if not isinstance(path, str) or isinstance(route, WebSocketRoute):  # the router closes every WebSocket
        raise ConfigError(f"a middleware's route {route!r} has no path of HTTP")
    return path


def _fixed_segment(route: BaseRoute) -> str:
    segment = first_segment(_path(route))
    if segment == "/" or "{" in segment:
        raise ConfigError(f"a middleware's route {_path(route)!r} must begin with a fixed path segment")
    return segment


class _WrongMethod:
    """An ASGI app behind the routes of the router and of the middlewares: it refuses methods that no route accepts."""

    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = sorted(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise MethodNotAllowed(f"{scope['path']} does not take {scope['method']}", self._allowed)
