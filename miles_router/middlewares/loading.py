"""The loading of middlewares: classes are found by name, options are bound, and the stack is built.

The first middleware in the list is the outermost.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast, get_type_hints

from miles_router.asgi.exchange import Exchange, Receive, Scope, Send
from miles_router.errors import ConfigError
from miles_router.middlewares.contract import ASGIApp
from miles_router.middlewares.router import Router
from miles_router.settings.config import MiddlewareSpec, OptionText, middleware_names, nearest
from miles_router.settings.values import WrongValue, convert, describe

CAPABILITIES = (
    *("lifespan", "routes", "admin_routes", "open_routes", "data_paths"),
    *("key_of", "owner_name", "metrics", "restore", "shape_errors"),
)
REQUIRED: Any = inspect.Parameter.empty

Layer = TypeVar("Layer")


@dataclass(frozen=True)
class Option:
    """An option of a middleware, as `miles-router middlewares` lists it."""

    name: str
    type: str
    default: Any
    value: Any


@dataclass(frozen=True)
class LoadedMiddleware:
    """A middleware class with checked options for its constructor."""

    name: str
    path: str
    cls: Callable[..., ASGIApp]
    options: Mapping[str, Any]
    table: tuple[Option, ...]


def load_middlewares(specs: Sequence[MiddlewareSpec]) -> list[LoadedMiddleware]:
    """Import all middleware classes and check their options. No middleware is constructed yet.

    Raises:
        ConfigError: a class or an option is wrong. The message is one line; for a misspelling, it suggests the
            nearest name.
    """
    loaded = []
    for name, spec in zip(middleware_names(specs), specs, strict=True):
        cls = find_class(spec.path)
        table = bind_options(cls, spec)
        given = {option.name: option.value for option in table if option.name in spec.options}
        loaded.append(LoadedMiddleware(name, spec.path, cls, given, table))
    return loaded


def find_class(path: str) -> Callable[..., ASGIApp]:
    """Import the middleware class at `pkg.module.Class` (or `pkg.module:Class`).

    Raises:
        ConfigError: `class_at` fails, or an attribute with the name of an optional method is not callable.
    """
    found = class_at(path, "middleware")
    for capability in CAPABILITIES:
        if not callable(getattr(found, capability, _absent)):
            raise ConfigError(f"middleware {path!r}: its attribute {capability!r} must be a method")
    return cast("Callable[..., ASGIApp]", found)


def class_at(path: str, what: str) -> Callable[..., Any]:
    """Import the class at a dotted path.

    Args:
        what: the purpose of the class, for error messages ("middleware").

    Raises:
        ConfigError: the module is missing or fails to import, or the name is missing or not a class.
    """
    module_name, _, class_name = path.replace(":", ".").rpartition(".")
    if not module_name or not class_name:
        raise ConfigError(f"{what} {path!r}: write it as pkg.module.Class")
    module = _import(module_name, f"{what} {path!r}")
    found: Any = getattr(module, class_name, None)
    if found is None:
        classes = [name for name, value in vars(module).items() if inspect.isclass(value)]
        raise ConfigError(f"{what} {path!r}: {module_name} has no {class_name!r}{nearest(class_name, classes)}")
    if not inspect.isclass(found):
        raise ConfigError(f"{what} {path!r}: {class_name} is not a class but {type(found).__name__}")
    return found


def _absent() -> None:
    """Stand in for an optional method that a class does not define."""


def _import(module_name: str, where: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(missing + "."):
            raise ConfigError(f"{where}: there is no module {missing!r}") from None
        raise ConfigError(f"{where}: {module_name} needs the module {missing!r}") from error
    except Exception as error:  # code from outside the router may raise anything at import
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{where}: {module_name} fails to import: {reason}") from error


def bind_options(cls: Callable[..., ASGIApp], spec: MiddlewareSpec) -> tuple[Option, ...]:
    """Check the given options against the constructor's keywords and types; return all options with their values.

    Raises:
        ConfigError: the constructor has no `router` keyword, an option is unknown or has the wrong type, or an
            option without a default is not given.
    """
    where = f"middleware {spec.path!r}"
    parameters = _keywords(cls)
    takes_anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if "router" not in parameters and not takes_anything:
        raise ConfigError(f"{where}: its constructor must take (app, *, router, ...)")
    options = {
        name: p
        for name, p in parameters.items()
        if name != "router" and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }
    for name in spec.options:
        if name not in options and not takes_anything:
            raise ConfigError(f"{where}: unknown option {name!r}{nearest(name, options)}")
    hints = _hints(cls)
    table = [_bind(where, name, p, hints.get(name, Any), spec.options) for name, p in options.items()]
    extra = [Option(name, "any", REQUIRED, value) for name, value in spec.options.items() if name not in options]
    return (*table, *extra)


def _bind(where: str, name: str, parameter: inspect.Parameter, hint: Any, given: Mapping[str, Any]) -> Option:
    if name not in given:
        if parameter.default is REQUIRED:
            raise ConfigError(f"{where}: option {name!r} ({describe(hint)}) must be set")
        return Option(name, describe(hint), parameter.default, parameter.default)
    value = given[name]
    try:
        value = convert(str(value), hint, from_text=True) if isinstance(value, OptionText) else convert(value, hint)
    except WrongValue as error:
        raise ConfigError(f"{where}: option {name!r}: {error}") from None
    return Option(name, describe(hint), parameter.default, value)


def _keywords(cls: Callable[..., ASGIApp]) -> dict[str, inspect.Parameter]:
    """Return the constructor's parameters after the first one, which is the wrapped app."""
    parameters = list(inspect.signature(cls).parameters.items())
    return dict(parameters[1:]) if parameters and parameters[0][1].kind is not inspect.Parameter.VAR_KEYWORD else {}


def _hints(cls: Any) -> dict[str, Any]:
    try:
        return get_type_hints(cls.__init__)
    except NameError:  # a type is imported only under TYPE_CHECKING: options are not converted
        return {}


def build_stack(
    innermost: ASGIApp, loaded: Iterable[LoadedMiddleware], routers: Mapping[str | None, Router]
) -> tuple[ASGIApp, dict[str | None, list[ASGIApp]]]:
    """Wrap `innermost` in all middlewares. Return the outermost app and each model's middlewares, outermost first.

    Args:
        routers: the handle of each model with middlewares; None is the default model. A class with `one_model` is
            built for each model; the models share the others.

    Raises:
        ConfigError: a middleware does not accept its options or its model.
    """
    layers: dict[str | None, list[ASGIApp]] = {model: [] for model in routers}
    app = innermost
    for each in reversed(list(loaded)):
        inside, router = app, routers[None]
        shared = app = each.cls(inside, router=router, **each.options)
        built = dict.fromkeys(routers, shared)
        if getattr(shared, "one_model", False):
            built |= {model: _built_for(model, each, inside, other) for model, other in routers.items() if model}
            app = _OfOneModel(built, inside)
        for model, layer in built.items():
            layers[model].insert(0, layer)
    return app, layers


def _built_for(model: str, loaded: LoadedMiddleware, app: ASGIApp, router: Router) -> ASGIApp:
    """Return a middleware of a further model.

    Raises:
        ConfigError: the class does not accept this model. The message names it.
    """
    try:
        return loaded.cls(app, router=router, **loaded.options)
    except ConfigError as error:
        raise ConfigError(f"trained_models: {model}: {error}") from None


def each_once(layers: Iterable[Layer]) -> list[Layer]:
    """Return the layers without repetitions. Only the same object is a repetition: a middleware's own equality does
    not count."""
    return [*{id(each): each for each in layers}.values()]


class _OfOneModel:
    """A wrapper that passes a request to its model's middleware, or past it if the model has none."""

    def __init__(self, layers: Mapping[str | None, ASGIApp], inside: ASGIApp) -> None:
        self._layers = layers
        self._inside = inside

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        model = Exchange.of(scope).pool if scope["type"] == "http" else None
        return self._layers.get(model, self._inside)(scope, receive, send)
