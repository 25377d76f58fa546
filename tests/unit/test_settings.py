"""Settings: the table, the merge of its sources, values against annotations, middlewares by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
from starlette.routing import Mount, Route, WebSocketRoute

from miles_router.app import create_app
from miles_router.errors import ConfigError
from miles_router.middlewares.loading import find_class, load_middlewares
from miles_router.settings.config import MiddlewareSpec, OptionText, RouterConfig, load
from miles_router.settings.keys import admin_keys, data_keys
from miles_router.settings.values import WrongValue, convert

IMPOSSIBLE: list[tuple[str, Any, str]] = [
    ("host", "", "must name a host"),
    ("port", 65536, "between 0 and 65535"),
    ("worker_urls", ("http://a", "b"), "must start with http"),
    ("health_check_interval", 0.0, "greater than 0"),
    ("health_check_timeout", float("nan"), "greater than 0"),
    ("health_check_failure_threshold", 0, "at least 1"),
    ("connect_timeout", float("inf"), "greater than 0"),
    ("request_timeout", -0.1, "at least 0"),
    ("max_retries", -1, "at least 0"),
    ("api_key", "", "must not be empty"),
    ("public_url", "rollouts.test", "must start with http"),
    ("public_url", "https://user@rollouts.test", "credentials"),
    ("data_paths", ("v1/files",), "start with /"),
    ("api_key", "a b", "printable ASCII"),
    ("admin_api_key", "a\n", "printable ASCII"),
]


@pytest.fixture
def config_file(tmp_path: Path) -> Any:
    def write(text: str) -> str:
        path = tmp_path / "router.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def refusal(**sources: Any) -> str:
    """The one line that stops the start."""
    with pytest.raises(ConfigError) as stopped:
        load(**{"flags": {}, "environment": {}, **sources})
    line = str(stopped.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize(("name", "value", "says"), IMPOSSIBLE)
def test_an_impossible_value_is_refused_by_name(name: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError) as stopped:
        RouterConfig(**{name: value})
    assert str(stopped.value).startswith(f"{name}: ")
    assert says in str(stopped.value)


def test_each_source_overrides_those_before_it(config_file: Any) -> None:
    path = config_file("port: 1\nhost: file\nmax_retries: 1\nlog_level: error\n")
    environment = {"MILES_ROUTER_PORT": "2", "MILES_ROUTER_HOST": "env", "MILES_ROUTER_MAX_RETRIES": "2", "OTHER": "x"}
    loaded = load({"port": "3", "host": "flag"}, environment, ["port=4"], path)
    config = loaded.config
    assert (config.port, config.host, config.max_retries, config.log_level) == (4, "flag", 2, "error")
    origins = {name: loaded.origins[name] for name in ("port", "host", "max_retries", "log_level", "readmit")}
    assert origins == {
        "port": "--set",
        "host": "--host",
        "max_retries": "MILES_ROUTER_MAX_RETRIES",
        "log_level": path,
        "readmit": "default",
    }


@pytest.mark.parametrize(
    ("sources", "says"),
    [
        ({"flags": {"port": "x"}}, "--port: port: expected int, got 'x'"),
        ({"flags": {"log_level": "loud"}}, "--log-level: log_level: expected one of"),
        ({"flags": {"max_retries": "-1"}}, "--max-retries: max_retries: must be at least 0"),
        ({"environment": {"MILES_ROUTER_PROT": "1"}}, "unknown setting 'prot'; did you mean 'port'?"),
        ({"environment": {"MILES_ROUTER_ZZZ": "1"}}, "unknown setting 'zzz'"),
        ({"assignments": ["port"]}, "--set 'port': write --set setting=value"),
        ({"assignments": ["nobody.limit=1"]}, "no middleware called 'nobody'"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_source_and_setting(sources: dict[str, Any], says: str) -> None:
    assert says in refusal(**sources)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("port: '80'\n", "port: expected int, got '80'"),
        ("access_log: 1\n", "access_log: expected bool"),
        ("prot: 1\n", "unknown setting 'prot'; did you mean 'port'?"),
        ("- port\n", "must be a mapping"),
        ("a: [\n", "not YAML"),
        ("middlewares: 7\n", "middlewares: expected"),
        ("middlewares: [7]\n", "expected a dotted path or {path, options}, got 7"),
        ("middlewares: [{options: {}}]\n", "expected a dotted path or {path, options}"),
        ("middlewares: [{path: a.B, option: {}}]\n", "expected {path, options}"),
        ("middlewares: [{path: a.B, options: 7}]\n", "with a mapping of options"),
        ("middlewares: []\nmiddleware_paths: []\n", "either middlewares or middleware_paths"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_it(config_file: Any, text: str, says: str) -> None:
    path = config_file(text)
    line = refusal(file=path)
    assert says in line
    assert path in line


@pytest.mark.parametrize("name", ["api_key", "admin_api_key", "api_key_file", "admin_api_key_file"])
@pytest.mark.parametrize("text", ["", " ", "none", "NULL"])
def test_a_key_that_is_given_and_empty_stops_the_start_by_its_name(config_file: Any, name: str, text: str) -> None:
    path = config_file("api_key: of-the-file\n")
    flag, variable = f"--{name.replace('_', '-')}", f"MILES_ROUTER_{name.upper()}"
    assert refusal(flags={name: text}, file=path).startswith(f"{flag}: {name}: is empty")
    assert refusal(environment={variable: text}, file=path).startswith(f"{variable}: {name}: is empty")
    assert refusal(assignments=[f"{name}={text}"], file=path).startswith(f"--set: {name}: is empty")


def test_a_wrong_key_is_not_shown(config_file: Any) -> None:
    lines = [
        refusal(environment={"MILES_ROUTER_API_KEY": "hush hush"}),
        refusal(assignments=["admin_api_key=hush\u00e9"]),
        refusal(file=config_file("api_key: [hush]\n")),
    ]
    assert "hush" not in "".join(lines)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "contains no key"),
        (b"\n  \n", "contains no key"),
        (b"good\nhush hush\n", "key 2 must be printable"),
        (b"none\n", "key 1 must not be empty"),
        (b"\xff", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_file_without_good_keys_stops_the_start(tmp_path: Path, content: bytes | None, says: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    for name, read in (("api_key_file", data_keys), ("admin_api_key_file", admin_keys)):
        given: dict[str, Any] = {name: str(file)}
        config = RouterConfig(**given)
        with pytest.raises(ConfigError, match=re.escape(f"{name}: {file}: {says}")) as stopped:
            read(config)
        assert "hush" not in str(stopped.value)


def test_set_gives_an_option_as_text_to_the_middleware_it_names() -> None:
    loaded = load({"middleware_paths": ["a.First", "b.First"]}, {}, ["first.limit=4", "first_2.name=x=y"])
    one, two = loaded.config.middlewares
    assert (one.options, two.options) == ({"limit": "4"}, {"name": "x=y"})
    assert all(isinstance(value, OptionText) for value in (*one.options.values(), *two.options.values()))
    assert loaded.origins["middlewares"] == "--middleware-paths and --set"


class Own:
    """A class of a middleware's author."""


@pytest.mark.parametrize(
    ("text", "annotation", "value"),
    [
        ("7", int, 7),
        ("7", float, 7.0),
        ("true", bool, True),
        ("NO", bool, False),
        ("off", bool, False),
        ("none", int | None, None),
        ("", int | None, None),
        ("none", str | None, None),
        ("7", str | int, 7),
        ("a", Literal["a", "b"], "a"),
        ("2", Literal[1, 2], 2),
        ("a,b c", tuple[str, ...], ("a", "b", "c")),
        ("1 2", list[int], [1, 2]),
        ("a b", list, ["a", "b"]),
        ("x", Own, "x"),
    ],
)
def test_text_is_read_as_the_annotation_asks(text: str, annotation: Any, value: object) -> None:
    got = convert(text, annotation, from_text=True)
    assert (got, type(got)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "annotation", "says"),
    [
        ("seven", int, "expected int, got 'seven'"),
        ("x", float, "expected float, got 'x'"),
        ("maybe", bool, "expected true or false, got 'maybe'"),
        ("x", int | None, "expected int | none, got 'x'"),
        ("c", Literal["a", "b"], "expected one of a | b, got 'c'"),
        ("1 x", list[int], "expected int, got 'x'"),
        ("x", Mapping[str, int], "expected Mapping"),
    ],
)
def test_text_that_does_not_fit_says_what_was_expected(text: str, annotation: Any, says: str) -> None:
    with pytest.raises(WrongValue) as wrong:
        convert(text, annotation, from_text=True)
    assert says in str(wrong.value)


PLUGINS = "tests.support.plugins"
WORKING = f"{PLUGINS}.working"


async def nothing(*_: object) -> None:
    """Handles a route that is never called."""


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


def test_no_middleware_may_take_a_route_of_the_routers_own() -> None:
    with pytest.raises(ConfigError, match=r"'/metrics', which is a path of the router's own"):
        create_app(RouterConfig(middlewares=(MiddlewareSpec(f"{WORKING}.Stealing"),)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page": "/router/page"}, "'/router', which is a path of the router's own"),
        ({"page": "/health"}, "'/health', which is a path of the router's own"),
        ({"page": "/pause_generation"}, "'/pause_generation', which is a path of the router's own"),
        ({"page": "/v1/load_lora_adapter"}, "'/v1/load_lora_adapter', which is a path of the router's own"),
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


@pytest.mark.parametrize(
    ("power", "given", "message"),
    [
        ("open_routes", Mount("/page", app=nothing), "open or admin route '/page' must be a Route"),
        ("admin_routes", Mount("/router/page", app=nothing), "open or admin route '/router/page' must be a Route"),
        ("routes", WebSocketRoute("/socket", nothing), "has no path of HTTP"),
        ("routes", Route("/v1/load_lora_adapter", nothing), "which is a path of the router's own"),
        ("data_paths", "/router/info", "data_paths: /router/info is a path of the router's own"),
    ],
)
def test_what_the_router_would_never_call_is_refused(power: str, given: object, message: str) -> None:
    odd = MiddlewareSpec(f"{WORKING}.Odd", {"power": power, "given": [given]})
    with pytest.raises(ConfigError) as caught:
        create_app(RouterConfig(middlewares=(odd,)))
    assert message in str(caught.value)


def test_a_middleware_that_gives_a_text_for_paths_opens_nothing() -> None:
    careless = MiddlewareSpec(f"{WORKING}.Inside", {"careless": True})
    with pytest.raises(ConfigError, match="data_paths: every path must start with /"):
        create_app(RouterConfig(middlewares=(careless,)))


def test_bare_paths_from_a_stronger_source_keep_the_options_of_the_file(config_file: Any) -> None:
    path = config_file("middlewares:\n- {path: b.Second, options: {limit: 4}}\n- a.First\n")
    loaded = load({"middleware_paths": ["a.First", "b.Second"]}, {}, (), path)
    assert loaded.config.middlewares == (MiddlewareSpec("a.First"), MiddlewareSpec("b.Second", {"limit": 4}))
    assert loaded.origins["middlewares"] == "--middleware-paths"
