"""All settings of the router in one frozen dataclass, and the loader that merges their sources.

defaults < YAML file (`--config`) < environment (`MILES_ROUTER_PORT`) < flags (`--port`) < `--set port=...`. Flags,
environment names and YAML keys are all derived from the fields below; there is no second list. This module imports
nothing heavy: `--help` and a wrong setting answer at once.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

from miles_router.errors import BadRequest, ConfigError
from miles_router.fleet.placement.sessions import NAMES, invalid_name_reason
from miles_router.fleet.pool import ReadmitPolicy
from miles_router.fleet.sources import sources_problem
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.log import LogFormat
from miles_router.settings.keys import key_problem
from miles_router.settings.trained_models import default_problem, models_problem
from miles_router.settings.values import WrongValue, convert, describe, is_none, show
from miles_router.state.blobs import Sync

ENVIRONMENT_PREFIX = "MILES_ROUTER_"
#: The errors that PyYAML raises, besides its own, for scalars such as `2026-13-45`, `!!bool maybe` or an
#: integer of 5,000 digits.
YAML_SCALAR_ERRORS = (ValueError, ArithmeticError, LookupError, AttributeError)
#: The middleware that `otel` lists first.
TRACES = "middleware_hub.traces_middleware.TracesMiddleware"
#: The middleware that `dashboard` lists last.
DASHBOARD = "middleware_hub.dashboard_middleware.DashboardMiddleware"
MAX_MODEL_ID = 256
MAX_PROCESSES = 64
Check = Callable[[Any], "str | None"]


def _at_least(low: float) -> Check:
    return lambda value: None if low <= value < math.inf else f"must be at least {low:g}"


def _positive(value: float) -> str | None:
    return None if 0 < value < math.inf else "must be greater than 0"


def _port(value: int) -> str | None:
    return None if 0 <= value <= 65535 else "must be between 0 and 65535"


def _processes(value: int) -> str | None:
    return None if 1 <= value <= MAX_PROCESSES else f"must be between 1 and {MAX_PROCESSES}"


def _worker_urls(urls: Iterable[str]) -> str | None:
    for url in urls:
        try:
            parse_worker_url(url)
        except BadRequest as error:
            return str(error)
    return None


def _public_url(value: str | None) -> str | None:
    return None if value is None else _worker_urls([value])


def paths_problem(paths: Iterable[str]) -> str | None:
    """Return why these cannot be paths, or None."""
    for path in paths:
        if not path.startswith("/") or path == "/":
            return "every path must start with /"
        if any(char in "{}?#%" or char.isspace() for char in path):
            return "a path must be literal: without parameters, query or escapes"
    return None


def _host(value: str) -> str | None:
    try:
        named = bool(value.encode("idna")) and not any(char.isspace() for char in value)
    except UnicodeError:
        named = False
    return None if named else "must name a host or an address"


def model_id_problem(name: object) -> str | None:
    """Return why this cannot be a `model_id`, or None."""
    if isinstance(name, str) and 0 < len(name) <= MAX_MODEL_ID and name.isprintable() and name == name.strip():
        return None
    return f"must be 1 to {MAX_MODEL_ID} printable characters without space around them"


def _model_id(value: str | None) -> str | None:
    return None if value is None else model_id_problem(value)


def setting(default: Any, help: str, check: Check | None = None, *, secret: bool = False, guards: bool = False) -> Any:
    """Return the dataclass field of one setting: default, help text (with units), and a check that returns a problem or
    None. A setting that `guards` access cannot be given as empty. A `secret` one is also never shown."""
    return field(default=default, metadata={"help": help, "check": check, "secret": secret, "guards": guards or secret})


@dataclass(frozen=True)
class MiddlewareSpec:
    """A middleware to load: its dotted path `pkg.module.Class` and its options."""

    path: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """All settings of a router, with their defaults."""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 serves other machines", _host)
    port: int = setting(31000, "port to listen on; 0 uses a free one", _port)
    processes: int = setting(1, "processes that serve requests on one port; about one for each core", _processes)
    worker_urls: tuple[str, ...] = setting(
        (), "workers to start with, each routable once it answers; others register with POST /add_worker", _worker_urls
    )
    discover: tuple[str, ...] = setting(
        (), "where to find workers that do not register: dns://NAME:PORT, file:PATH", sources_problem
    )
    model_id: str | None = setting(
        None, "the model of workers that register without a model_id, and of the middlewares", _model_id
    )
    trained_models: tuple[str, ...] = setting(
        (), "further recorded models, each MODEL_ID=CHECKPOINT, served below /models/MODEL_ID/", models_problem
    )
    middlewares: tuple[MiddlewareSpec, ...] = setting(
        (), "the stack, first listed = outermost; in YAML a list of {path, options}"
    )
    hf_checkpoint: str | None = setting(None, "model directory or hub name, for middlewares that need its tokenizer")
    trust_remote_tokenizer: bool = setting(False, "run code that comes with the checkpoint's tokenizer")
    chat_template_path: str | None = setting(None, "Jinja chat template that replaces the checkpoint's own")
    health_check_interval: float = setting(10.0, "seconds between cheap liveness checks", _positive)
    health_check_timeout: float = setting(5.0, "seconds a check may take", _positive)
    health_check_failure_threshold: int = setting(3, "failures in a row that quarantine a worker", _at_least(1))
    deep_health_check_interval: float = setting(
        60.0, "seconds between deep checks, which generate a token; 0: only before readmission", _at_least(0)
    )
    stall_timeout: float = setting(
        60.0, "seconds without a sign of life after which a worker with requests is quarantined; 0: never", _at_least(0)
    )
    readmit: ReadmitPolicy = setting("same-weights", "when a recovered worker may return")
    connect_timeout: float = setting(5.0, "seconds to connect to a worker", _positive)
    request_timeout: float = setting(0.0, "seconds a worker may take for a whole reply; 0: no limit", _at_least(0))
    max_retries: int = setting(2, "other workers to try when one cannot be reached or is lost", _at_least(0))
    max_connections: int = setting(0, "most requests sent to workers at once, others wait; 0: no limit", _at_least(0))
    max_request_bytes: int = setting(128 * 1024 * 1024, "largest request body in bytes", _at_least(1))
    head_timeout: float = setting(30.0, "seconds a request's head may take to arrive, or its body may stall", _positive)
    max_text_chars: int = setting(
        8 * 1024 * 1024, "longest text, in characters, that a middleware encodes; also the most token ids", _at_least(1)
    )
    max_answer_bytes: int = setting(
        1024 * 1024 * 1024,
        "bytes of one reply that a middleware may hold to read it; larger ones are not recorded",
        _at_least(1),
    )
    gate_max_held: int = setting(10_000, "requests that may wait while the fleet is paused", _at_least(0))
    gate_timeout: float = setting(
        0.0, "seconds a request may wait while the fleet is paused; 0: no limit", _at_least(0)
    )
    policy: str = setting(
        "least-inflight",
        "which worker a request goes to: least-inflight, or a class of your own at pkg.module.Class",
    )
    affinity_names: tuple[str, ...] = setting(
        NAMES,
        "headers, and body:NAME fields, whose value keeps requests on one worker; X-Session-Id and a session's path "
        "come first; an empty list: none of them",
        invalid_name_reason,
    )
    admission: float = setting(
        0.0,
        "fraction of its memory that every worker may hold before new sessions wait; 0: no limit",
        _at_least(0),
    )
    heartbeat_interval: float = setting(
        15.0,
        "seconds without output in a stream of a session or text rollout before a heartbeat is sent; 0: never",
        _at_least(0),
    )
    partial_rollout: Literal["return", "resume"] = setting(
        "return", "a generation cut by a pause: return the part, or resume it after continue"
    )
    resume_on_worker_loss: bool = setting(False, "continue a stream on another worker when its worker is lost")
    move_after: float = setting(
        0.0, "seconds a text rollout runs before a less loaded worker may take it over; 0: never", _at_least(0)
    )
    fan_out: tuple[str, ...] = setting((), "further paths whose requests go to every worker", paths_problem)
    shutdown_timeout: float = setting(
        30.0, "seconds that requests in flight may take to finish after SIGTERM", _at_least(0)
    )
    data_paths: tuple[str, ...] = setting(
        (),
        "further paths that --api-key opens if there is an admin key; one that ends with / includes all below it",
        paths_problem,
    )
    public_url: str | None = setting(
        None, "URL where clients reach the router, behind TLS or a balancer; default: as in the request", _public_url
    )
    api_key: str | None = setting(None, "key that clients must send (Authorization: Bearer)", key_problem, secret=True)
    api_key_file: str | None = setting(None, "file of such keys, one per line, read at the start", guards=True)
    admin_api_key: str | None = setting(
        None, "key for all but the clients' own paths; default: the clients' keys", key_problem, secret=True
    )
    admin_api_key_file: str | None = setting(None, "file of such keys, one per line, read at the start", guards=True)
    state_dir: str | None = setting(None, "directory for state that survives a restart; none: state is in memory only")
    state_sync: Sync = setting("process", "what state survives: the loss of the process, or of the machine (fsync)")
    state_rows: bool = setting(False, "store the expert rows of sessions and texts there too; they are large")
    dashboard: bool = setting(True, "show the dashboard and its routes: lists DashboardMiddleware last")
    dashboard_text: Literal["on", "off"] = setting(
        "on", "whether texts, token ids and bytes of episodes are shown; off: to no user"
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "least severe log line shown")
    log_format: LogFormat = setting("text", "text for people, json for machines")
    access_log: bool = setting(False, "one log line for every request")
    otel: bool = setting(False, "trace turns with OpenTelemetry: lists TracesMiddleware first (extra otel)")

    @property
    def chain(self) -> tuple[MiddlewareSpec, ...]:
        """The middlewares, outermost first: the listed ones, with the ones that `otel` and `dashboard` add."""
        listed = {spec.path for spec in self.middlewares}
        first = (MiddlewareSpec(TRACES),) if self.otel and TRACES not in listed else ()
        last = (MiddlewareSpec(DASHBOARD),) if self.dashboard and DASHBOARD not in listed else ()
        return (*first, *self.middlewares, *last)

    def __post_init__(self) -> None:
        for spec in FIELDS.values():
            check: Check | None = spec.metadata["check"]
            value = getattr(self, spec.name)
            if check is not None and (problem := check(value)):
                given = "" if spec.metadata["secret"] else f", got {show(value)}"
                raise ConfigError(f"{spec.name}: {problem}{given}")
        if problem := default_problem(self.trained_models, self.model_id):
            raise ConfigError(f"trained_models: {problem}")


FIELDS = {spec.name: spec for spec in fields(RouterConfig)}
TYPES: dict[str, Any] = get_type_hints(RouterConfig)
#: Titles of groups of settings, by the first setting of each group.
GROUPS: Mapping[str, str] = {
    "host": "listening",
    "worker_urls": "workers, middlewares, model",
    "health_check_interval": "health of workers",
    "connect_timeout": "requests and limits",
    "gate_max_held": "placement and pauses",
    "shutdown_timeout": "shutdown, paths and keys",
    "state_dir": "state on disk",
    "dashboard": "dashboard and logs",
}
#: The short form of `middlewares` on the command line and in the environment: dotted paths without options.
PATHS = "middleware_paths"


@dataclass(frozen=True)
class Loaded:
    """A configuration, and the source of each setting's value."""

    config: RouterConfig
    origins: Mapping[str, str]


class _Merge:
    """A merge of values from weaker to stronger sources. Every problem becomes one line that names the setting."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins = dict.fromkeys(FIELDS, "default")
        self.options: list[tuple[str, str, str]] = []  # (middleware.option, value, origin) from --set

    def take(self, name: str, value: object, origin: str, *, from_text: bool) -> None:
        try:
            if name == PATHS:
                name, value = "middlewares", self._paths(convert(value, tuple[str, ...], from_text=from_text))
            elif name == "middlewares":
                value = tuple(_spec(item) for item in convert(value, list[Any]))
            elif name in FIELDS and FIELDS[name].metadata["guards"] and is_none(value):
                raise WrongValue("is empty, which would allow access without a key; leave it out if that is intended")
            elif name in FIELDS:
                value = convert(value, TYPES[name], from_text=from_text)
            else:
                raise ConfigError(f"{origin}: unknown setting {name!r}{nearest(name, [*FIELDS, PATHS])}")
        except WrongValue as error:
            if name in FIELDS and FIELDS[name].metadata["secret"] and not is_none(value):
                raise ConfigError(f"{origin}: {name}: expected text") from None
            raise ConfigError(f"{origin}: {name}: {error}") from None
        self.values[name] = value
        self.origins[name] = origin

    def _paths(self, paths: Iterable[str]) -> tuple[MiddlewareSpec, ...]:
        """Return the middlewares of these paths, in their order. Options that a weaker source gave to the same path
        stay."""
        known = {spec.path: spec for spec in self.values.get("middlewares", ())}
        return tuple(known.get(path) or MiddlewareSpec(path) for path in paths)

    def assign(self, assignment: str) -> None:
        """Apply one `--set name=value`. A dotted name is an option of a middleware, and is converted when that is
        loaded."""
        name, separator, value = assignment.partition("=")
        if not separator or not name.strip():
            raise ConfigError(f"--set {assignment!r}: write --set setting=value or --set middleware.option=value")
        if "." in name:
            self.options.append((name.strip(), value, "--set"))
        else:
            self.take(name.strip().replace("-", "_"), value, "--set", from_text=True)

    def finish(self) -> Loaded:
        if self.options:
            self.values["middlewares"] = _with_options(self.values.get("middlewares", ()), self.options)
            self.origins["middlewares"] += " and --set"
        try:
            return Loaded(RouterConfig(**self.values), self.origins)
        except ConfigError as error:
            name = str(error).partition(":")[0]
            raise ConfigError(f"{self.origins.get(name, 'configuration')}: {error}") from None


def load(
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    assignments: Iterable[str] = (),
    file: str | None = None,
) -> Loaded:
    """Merge all sources. `flags` contains the flags that were given, as text or lists of text.

    Raises:
        ConfigError: an unknown setting, a wrong type or an invalid value; one line that names source and setting.
    """
    merge = _Merge()
    file = file or environment.get(ENVIRONMENT_PREFIX + "CONFIG")
    if file:
        for name, value in read_file(file).items():
            merge.take(name, value, file, from_text=False)
    for name, text in environment.items():
        if name.startswith(ENVIRONMENT_PREFIX) and name != ENVIRONMENT_PREFIX + "CONFIG":
            merge.take(name[len(ENVIRONMENT_PREFIX) :].lower(), text, name, from_text=True)
    for name, value in flags.items():
        merge.take(name, value, f"--{name.replace('_', '-')}", from_text=True)
    for assignment in assignments:
        merge.assign(assignment)
    return merge.finish()


def read_file(path: str) -> dict[str, Any]:
    """Return the settings in a YAML file.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or is not a mapping of names to values.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
            try:
                return super().construct_object(node, deep)
            except YAML_SCALAR_ERRORS:
                message = "this value cannot be read, or is too long"
                raise yaml.constructor.ConstructorError(None, None, message, node.start_mark) from None

    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"--config {path}: its lists or mappings are nested too deep") from None
    if not isinstance(content, dict | None):
        raise ConfigError(f"--config {path}: the top level must be a mapping of settings")
    if wrong := [name for name in content or {} if not isinstance(name, str)]:
        raise ConfigError(f"--config {path}: the name of a setting must be text, got {show(wrong[0])}")
    settings = {name.replace("-", "_"): value for name, value in (content or {}).items()}
    if "middlewares" in settings and PATHS in settings:
        raise ConfigError(f"{path}: give either middlewares or {PATHS}, not both")
    return settings


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for a near miss, else ""."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _spec(item: object) -> MiddlewareSpec:
    if isinstance(item, MiddlewareSpec):
        return item
    if isinstance(item, str):
        return MiddlewareSpec(item)
    if not isinstance(item, dict) or not isinstance(item.get("path"), str):
        raise WrongValue(f"expected a dotted path or {{path, options}}, got {show(item)}")
    unknown = set(item) - {"path", "options"}
    options = item.get("options") or {}
    if unknown or not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise WrongValue(f"expected {{path, options}} with a mapping of options by name, got {show(item)}")
    return MiddlewareSpec(item["path"], options)


def _with_options(
    specs: tuple[MiddlewareSpec, ...], assignments: Iterable[tuple[str, str, str]]
) -> tuple[MiddlewareSpec, ...]:
    options = [dict(spec.options) for spec in specs]
    names = middleware_names(specs)
    for dotted, value, origin in assignments:
        name, _, option = dotted.partition(".")
        if name not in names:
            raise ConfigError(f"{origin}: no middleware called {name!r} is listed{nearest(name, names)}")
        options[names.index(name)][option] = OptionText(value)
    return tuple(MiddlewareSpec(spec.path, given) for spec, given in zip(specs, options, strict=True))


class OptionText(str):
    """A middleware option given as text on the command line, to be converted by its annotation later."""


def middleware_names(specs: Iterable[MiddlewareSpec]) -> list[str]:
    """Return the short name of each middleware: its class in snake case, with `_2`, `_3` for repeated ones."""
    bases = [snake_case(spec.path.rpartition(".")[2]) for spec in specs]
    counts = [bases[: position + 1].count(base) for position, base in enumerate(bases)]
    return [base if count == 1 else f"{base}_{count}" for base, count in zip(bases, counts, strict=True)]


def snake_case(name: str) -> str:
    """Return a class name in snake case: `OpenAISessionMiddleware` -> `openai_session_middleware`."""
    out = ""
    for index, char in enumerate(name):
        starts_word = char.isupper() and index and (name[index - 1].islower() or name[index + 1 : index + 2].islower())
        out += ("_" if starts_word else "") + char.lower()
    return out.replace("open_ai", "openai")


def shown(config: RouterConfig, name: str) -> str:
    """Return a setting's value for display; keys are never shown."""
    value = getattr(config, name)
    if FIELDS[name].metadata["secret"]:
        return "set (hidden)" if value else "none"
    if name == "middlewares":
        return ", ".join(spec.path for spec in value) or "none"
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def type_name(name: str) -> str:
    """Return a setting's type for display."""
    return describe(TYPES[name])
