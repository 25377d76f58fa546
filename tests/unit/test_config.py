"""The table of settings and the merge of its sources."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from miles_router.errors import ConfigError
from miles_router.settings.config import (
    FIELDS,
    MiddlewareSpec,
    OptionText,
    RouterConfig,
    load,
    middleware_names,
    nearest,
    read_file,
    shown,
    snake_case,
    type_name,
)
from miles_router.settings.keys import admin_keys, data_keys

IMPOSSIBLE: list[tuple[str, Any, str]] = [
    ("host", "", "must name a host"),
    ("host", "a b", "must name a host"),
    ("port", -1, "between 0 and 65535"),
    ("port", 65536, "between 0 and 65535"),
    ("worker_urls", ("http://a", "b"), "must start with http"),
    ("health_check_interval", 0.0, "greater than 0"),
    ("health_check_timeout", -1.0, "greater than 0"),
    ("health_check_timeout", float("nan"), "greater than 0"),
    ("health_check_failure_threshold", 0, "at least 1"),
    ("deep_health_check_interval", -1.0, "at least 0"),
    ("connect_timeout", float("inf"), "greater than 0"),
    ("request_timeout", -0.1, "at least 0"),
    ("request_timeout", float("inf"), "at least 0"),
    ("max_retries", -1, "at least 0"),
    ("max_connections", -1, "at least 0"),
    ("max_request_bytes", 0, "at least 1"),
    ("shutdown_timeout", -1.0, "at least 0"),
    ("api_key", "", "must not be empty"),
    ("api_key", "none", "must not be empty"),
    ("admin_api_key", " ", "must not be empty"),
    ("public_url", "rollouts.test", "must start with http"),
    ("public_url", "https://user@rollouts.test", "credentials"),
    ("data_paths", ("v1/files",), "start with /"),
    ("data_paths", ("/",), "start with /"),
    ("api_key", "a b", "printable ASCII"),
    ("admin_api_key", "caf\xe9", "printable ASCII"),
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


# The table


def test_every_setting_has_help_and_a_default_that_is_possible() -> None:
    defaults: dict[str, Any] = {name: spec.default for name, spec in FIELDS.items()}
    assert RouterConfig() == RouterConfig(**defaults)
    assert all(spec.metadata["help"] for spec in FIELDS.values())


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        RouterConfig().port = 1  # type: ignore[misc]


@pytest.mark.parametrize(("name", "value", "says"), IMPOSSIBLE)
def test_an_impossible_value_is_refused_by_name(name: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError) as stopped:
        RouterConfig(**{name: value})
    assert str(stopped.value).startswith(f"{name}: ")
    assert says in str(stopped.value)


# Sources and their order


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


def test_without_any_source_everything_is_the_default() -> None:
    loaded = load({}, {})
    assert loaded.config == RouterConfig()
    assert {*loaded.origins.values()} == {"default"}


def test_the_file_can_be_named_by_the_environment_and_a_flag_names_another(config_file: Any, tmp_path: Path) -> None:
    environment = {"MILES_ROUTER_CONFIG": config_file("port: 1\n")}
    assert load({}, environment).config.port == 1
    other = tmp_path / "other.yaml"
    other.write_text("host: h\n")
    assert load({}, environment, (), str(other)).config == RouterConfig(host="h")


def test_lists_come_from_every_source(config_file: Any) -> None:
    expected = ("http://a:1", "http://b:2")
    assert load({"worker_urls": ["http://a:1", "http://b:2"]}, {}).config.worker_urls == expected
    assert load({}, {"MILES_ROUTER_WORKER_URLS": "http://a:1,http://b:2"}).config.worker_urls == expected
    path = config_file("worker-urls:\n- http://a:1\n- http://b:2\n")
    assert load({}, {}, (), path).config.worker_urls == expected
    assert load({}, {}, ["worker-urls=http://a:1 http://b:2"]).config.worker_urls == expected


@pytest.mark.parametrize(
    ("sources", "says"),
    [
        ({"flags": {"port": "x"}}, "--port: port: expected int, got 'x'"),
        ({"flags": {"log_level": "loud"}}, "--log-level: log_level: expected one of"),
        ({"flags": {"max_retries": "-1"}}, "--max-retries: max_retries: must be at least 0"),
        ({"environment": {"MILES_ROUTER_PORT": "x"}}, "MILES_ROUTER_PORT: port: expected int"),
        ({"environment": {"MILES_ROUTER_PROT": "1"}}, "unknown setting 'prot'; did you mean 'port'?"),
        ({"environment": {"MILES_ROUTER_ZZZ": "1"}}, "unknown setting 'zzz'"),
        ({"assignments": ["prot=1"]}, "--set: unknown setting 'prot'; did you mean 'port'?"),
        ({"assignments": ["port"]}, "--set 'port': write --set setting=value"),
        ({"assignments": ["=1"]}, "--set '=1': write"),
        ({"assignments": ["port=-1"]}, "--set: port: must be between"),
        ({"assignments": ["nobody.limit=1"]}, "no middleware called 'nobody'"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_source_and_setting(sources: dict[str, Any], says: str) -> None:
    assert says in refusal(**sources)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("port: '80'\n", "port: expected int, got '80'"),
        ("port: 80.5\n", "port: expected int"),
        ("access_log: 1\n", "access_log: expected bool"),
        ("worker_urls: http://a\n", "worker_urls: expected list of str"),
        ("prot: 1\n", "unknown setting 'prot'; did you mean 'port'?"),
        ("port: -1\n", "port: must be between"),
        ("- port\n", "must be a mapping"),
        ("just text\n", "must be a mapping"),
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


def test_a_file_that_is_not_there_or_no_text_is_named(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(file=str(tmp_path / "absent.yaml"))
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in refusal(file=str(binary))


@pytest.mark.parametrize("text", ["", "# only a comment\n", "{}\n"])
def test_an_empty_file_says_nothing(config_file: Any, text: str) -> None:
    assert read_file(config_file(text)) == {}


# Keys


@pytest.mark.parametrize("name", ["api_key", "admin_api_key", "api_key_file", "admin_api_key_file"])
@pytest.mark.parametrize("text", ["", " ", "none", "NULL"])
def test_a_key_that_is_given_and_empty_stops_the_start_by_its_name(config_file: Any, name: str, text: str) -> None:
    path = config_file("api_key: of-the-file\n")
    flag, variable = f"--{name.replace('_', '-')}", f"MILES_ROUTER_{name.upper()}"
    assert refusal(flags={name: text}, file=path).startswith(f"{flag}: {name}: is empty")
    assert refusal(environment={variable: text}, file=path).startswith(f"{variable}: {name}: is empty")
    assert refusal(assignments=[f"{name}={text}"], file=path).startswith(f"--set: {name}: is empty")


@pytest.mark.parametrize("value", ["", "''", "null", "~", "none", "' '"])
@pytest.mark.parametrize("name", ["api_key", "admin_api_key_file"])
def test_so_does_one_in_a_file_of_settings(config_file: Any, name: str, value: str) -> None:
    assert f"{name}: is empty" in refusal(file=config_file(f"{name}: {value}\n"))


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


# Middlewares


def test_middlewares_come_as_bare_paths_or_with_options(config_file: Any) -> None:
    path = config_file("middlewares:\n- a.First\n- {path: b.Second, options: {limit: 4}}\n- {path: c.Third}\n")
    assert load({}, {}, (), path).config.middlewares == (
        MiddlewareSpec("a.First"),
        MiddlewareSpec("b.Second", {"limit": 4}),
        MiddlewareSpec("c.Third"),
    )


def test_bare_paths_from_a_stronger_source_keep_the_options_of_the_file(config_file: Any) -> None:
    path = config_file("middlewares:\n- {path: b.Second, options: {limit: 4}}\n- a.First\n")
    loaded = load({"middleware_paths": ["a.First", "b.Second"]}, {}, (), path)
    assert loaded.config.middlewares == (MiddlewareSpec("a.First"), MiddlewareSpec("b.Second", {"limit": 4}))
    assert loaded.origins["middlewares"] == "--middleware-paths"


def test_set_gives_an_option_as_text_to_the_middleware_it_names() -> None:
    loaded = load({"middleware_paths": ["a.First", "b.First"]}, {}, ["first.limit=4", "first_2.name=x=y"])
    one, two = loaded.config.middlewares
    assert (one.options, two.options) == ({"limit": "4"}, {"name": "x=y"})
    assert all(isinstance(value, OptionText) for value in (*one.options.values(), *two.options.values()))
    assert loaded.origins["middlewares"] == "--middleware-paths and --set"


def test_a_class_that_is_listed_again_gets_a_number() -> None:
    specs = [MiddlewareSpec(path) for path in ("a.Cache", "b.Cache", "c.Other", "d.Cache")]
    assert middleware_names(specs) == ["cache", "cache_2", "other", "cache_3"]


def test_names_that_begin_alike_do_not_count_for_each_other() -> None:
    specs = [MiddlewareSpec(path) for path in ("a.CacheControl", "b.Cache", "c.Cache")]
    assert middleware_names(specs) == ["cache_control", "cache", "cache_2"]


@pytest.mark.parametrize(
    ("name", "snake"),
    [
        ("RadixTreeMiddleware", "radix_tree_middleware"),
        ("OpenAISessionMiddleware", "openai_session_middleware"),
        ("HTTPServer", "http_server"),
        ("lower", "lower"),
        ("A", "a"),
        ("R3Replay", "r3_replay"),
    ],
)
def test_class_names_become_option_prefixes(name: str, snake: str) -> None:
    assert snake_case(name) == snake


# What people see


def test_settings_are_shown_for_people_and_keys_never() -> None:
    config = RouterConfig(
        api_key="secret",
        worker_urls=("http://a", "http://b"),
        middlewares=(MiddlewareSpec("a.B", {"key": "secret"}),),
        access_log=True,
        request_timeout=1.5,
    )
    rows = {name: shown(config, name) for name in FIELDS}
    assert "secret" not in str(rows)
    assert (rows["api_key"], rows["admin_api_key"]) == ("set (hidden)", "none")
    assert (rows["worker_urls"], rows["middlewares"]) == ("http://a, http://b", "a.B")
    assert (rows["access_log"], rows["request_timeout"], rows["hf_checkpoint"]) == ("true", "1.5", "none")
    assert shown(RouterConfig(), "worker_urls") == shown(RouterConfig(), "middlewares") == "none"


def test_types_are_shown_for_people() -> None:
    shown_types = {name: type_name(name) for name in ("port", "api_key", "worker_urls", "readmit")}
    assert shown_types == {
        "port": "int",
        "api_key": "str | none",
        "worker_urls": "list of str",
        "readmit": "same-weights | healthy | never",
    }


def test_a_near_miss_is_named() -> None:
    assert nearest("prot", ["port", "host"]) == "; did you mean 'port'?"
    assert nearest("zzz", ["port", "host"]) == ""
