"""Loading middlewares: every way it can go wrong is one line that stops the start."""

from __future__ import annotations

from typing import Any

import pytest

from miles_router.app import create_app
from miles_router.errors import ConfigError
from miles_router.middlewares.loading import REQUIRED, find_class, load_middlewares
from miles_router.settings.config import MiddlewareSpec, OptionText, RouterConfig

PLUGINS = "tests.support.plugins"
WORKING = f"{PLUGINS}.working"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_package.module.Class", "there is no module 'no_such_package'"),
        (f"{PLUGINS}.absent.Class", f"there is no module '{PLUGINS}.absent'"),
        (f"{PLUGINS}.broken.Class", "fails to import: RuntimeError: broken on purpose"),
        (f"{PLUGINS}.needy.Class", "needs the module 'no_such_module_anywhere'"),
        (f"{WORKING}.Taging", "has no 'Taging'; did you mean 'Tagging'?"),
        (f"{WORKING}.not_a_class", "not_a_class is not a class but int"),
        (f"{WORKING}.Misshapen", "its attribute 'routes' must be a method"),
        ("Class", "write it as pkg.module.Class"),
    ],
)
def test_a_path_that_names_no_class_is_one_line(path: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_class(path)
    assert message in str(caught.value)
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Tagging", {"tga": "x"}, "unknown option 'tga'; did you mean 'tag'?"),
        ("Tagging", {"times": "3"}, "option 'times': expected int, got '3'"),
        ("Tagging", {"times": True}, "option 'times': expected int, got True"),
        ("Plain", {"mode": "maybe"}, "expected one of on | off, got 'maybe'"),
        ("Demanding", {}, "option 'limit' (int) must be set"),
        ("Unaware", {}, "its constructor must take (app, *, router, ...)"),
    ],
)
def test_an_option_that_does_not_fit_is_one_line(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="working") as caught:
        load_middlewares([MiddlewareSpec(f"{WORKING}.{name}", options)])
    assert message in str(caught.value)


def test_text_from_the_command_line_becomes_what_the_annotation_says() -> None:
    (loaded,) = load_middlewares([MiddlewareSpec(f"{WORKING}.Tagging", {"times": OptionText("4")})])
    assert loaded.options == {"times": 4}


def test_the_table_lists_every_option_with_type_default_and_value() -> None:
    (loaded,) = load_middlewares([MiddlewareSpec(f"{WORKING}.Tagging", {"tag": "z"})])
    rows = [(option.name, option.type, option.default, option.value) for option in loaded.table]
    assert rows == [("tag", "str", "a", "z"), ("times", "int", 1, 1)]
    (demanding,) = load_middlewares([MiddlewareSpec(f"{WORKING}.Demanding", {"limit": 1})])
    assert demanding.table[0].default is REQUIRED


def test_a_class_listed_twice_has_two_names() -> None:
    names = [each.name for each in load_middlewares([MiddlewareSpec(f"{WORKING}.Plain")] * 3)]
    assert names == ["plain", "plain_2", "plain_3"]


def test_a_colon_may_stand_before_the_class() -> None:
    assert find_class(f"{WORKING}:Plain") is find_class(f"{WORKING}.Plain")


def test_no_middleware_may_take_a_route_of_the_routers_own() -> None:
    with pytest.raises(ConfigError, match=r"'/metrics', which is a path of the router's own"):
        create_app(RouterConfig(middlewares=(MiddlewareSpec(f"{WORKING}.Stealing"),)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page": "/router/page"}, "'/router', which is a path of the router's own"),
        ({"page": "/health"}, "'/health', which is a path of the router's own"),
        ({"page": "/pause_generation"}, "'/pause_generation', which is a path of the router's own"),
        ({"page": "/page/{name}"}, "open route '/page/{name}' must have no parameters"),
        ({"about": "/observed/about"}, "admin route '/observed/about' must begin with /router/"),
        ({"about": "/router"}, "admin route '/router' must begin with /router/"),
        ({"about": "/router/info"}, "admin route '/router/info' must begin with /router/ and differ from"),
    ],
)
def test_an_open_or_admin_route_has_a_path_of_its_own(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        create_app(RouterConfig(middlewares=(MiddlewareSpec(f"{WORKING}.Observing", options),)))
    assert message in str(caught.value)


def test_a_middleware_that_gives_a_text_for_paths_opens_nothing() -> None:
    careless = MiddlewareSpec(f"{WORKING}.Inside", {"careless": True})
    with pytest.raises(ConfigError, match="data_paths: every path must start with /"):
        create_app(RouterConfig(middlewares=(careless,)))
