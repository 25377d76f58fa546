"""What exists is documented: settings, flags, errors, metrics, routes, modules, words of the command line."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import get_args

import orjson
import pytest
from starlette.routing import Route

from middleware_hub.dashboard.page import PAGE
from middleware_hub.dashboard_middleware import DashboardMiddleware
from middleware_hub.indexer_topk_middleware import IndexerTopkMiddleware
from middleware_hub.openai_session_middleware import OpenAISessionMiddleware
from middleware_hub.radix_tree.answers import AnswerReason
from middleware_hub.radix_tree.requests import RequestReason
from middleware_hub.radix_tree.retrieval import FIELDS as FIELDS_OF_RETRIEVAL
from middleware_hub.radix_tree_middleware import RadixTreeMiddleware
from middleware_hub.routed_experts_middleware import RoutedExpertsMiddleware
from miles_router import cli
from miles_router.admin.routes import Admin
from miles_router.app import create_app
from miles_router.dialects import MIDDLEWARE_PATHS, NAMES
from miles_router.engines.answers import Unreadable
from miles_router.engines.generate import Reason
from miles_router.errors import ClientDisconnected, RouterError
from miles_router.metrics import Statistics
from miles_router.metrics.metrics import ROUTES
from miles_router.pools.registrations import Registrations
from miles_router.settings.config import ENVIRONMENT_PREFIX, FIELDS, RouterConfig
from miles_router.testing.worker import cli as worker_cli
from miles_router.trajectory import Retrieved, Trajectory
from tests.docs.generated import TABLES, marked, regenerated
from tests.docs.pages import PAGES, ROOT, name_of, read


def reasons() -> list[str]:
    """Why the text cache leaves a request or an answer alone."""
    return sorted({name for kind in (Reason, RequestReason, Unreadable, AnswerReason) for name in get_args(kind)})


def flags(parser: argparse.ArgumentParser) -> set[str]:
    """The long options of a command."""
    options = {option for action in parser._actions for option in action.option_strings}
    return {option for option in options if option.startswith("--")}


def test_the_tables_are_those_that_the_code_makes() -> None:
    stale = [name_of(page) for page in PAGES if regenerated(text := page.read_text(encoding="utf-8")) != text]
    assert not stale, f"run python -m tests.docs.generated: {stale}"


def test_every_table_stands_on_one_page() -> None:
    assert sorted(name for page in PAGES for name in marked(page.read_text(encoding="utf-8"))) == sorted(TABLES)


def missing(page: str, named: Iterable[str]) -> list[str]:
    """Return what a page does not have."""
    text, named = read(page), list(named)
    assert named
    return [each for each in named if each not in text]


def test_every_setting_is_documented_in_its_spellings() -> None:
    given = {name: "middleware_paths" if name == "middlewares" else name for name in FIELDS}
    options = [f"`{name}`<br>`--{each.replace('_', '-')}`" for name, each in given.items()]
    variables = [f"<br>`{ENVIRONMENT_PREFIX}{each.upper()}`" for each in given.values()]
    assert missing("docs/configuration.md", options + variables) == []


def test_every_flag_of_the_router_is_documented() -> None:
    page = read("docs/configuration.md")
    assert [flag for flag in flags(cli.parser()) if not re.search(rf"`{flag}[ `]", page)] == []


def test_every_flag_of_the_simulated_worker_is_documented() -> None:
    named = [f"`{flag}`" for flag in flags(worker_cli.build_parser()) - {"--help"}]
    assert missing("docs/simulated-worker.md", named) == []


def errors(base: type[RouterError] = RouterError) -> set[tuple[str, str]]:
    """Type and status of every error of ours that is sent."""
    ours = base.__module__.startswith(("miles_router.", "middleware_hub.")) and base is not ClientDisconnected
    own = {(base.type, str(base.status))} if ours and base.type else set()
    return own.union(*map(errors, base.__subclasses__()))


def test_every_error_is_documented_with_its_statuses() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\d, ]+)", read("docs/errors.md"), re.MULTILINE)
    assert len(rows) == len({name for name, _ in rows})
    assert {(name, status) for name, statuses in rows for status in statuses.strip(" ,").split(", ")} == errors()


def metrics() -> list[str]:
    """The name of every metric that a module of ours declares."""
    ours = [
        each for each in Statistics.__subclasses__() if each.__module__.startswith(("miles_router", "middleware_hub"))
    ]
    return sorted({family.name for declared in ours for family in declared.descriptions()})


def test_every_metric_is_documented() -> None:
    assert missing("docs/metrics.md", [f"| `{name}` |" for name in metrics()]) == []


def log_events() -> list[str]:
    """The name of every line that the server logs; those of the client and of the simulated worker are sentences."""
    named = re.compile(r"""logger\.(?:debug|info|warning|error)\(\s*"(\w+)\"""")
    modules = [*(ROOT / "miles_router").rglob("*.py"), *(ROOT / "middleware_hub").rglob("*.py")]
    return sorted({name for module in modules for name in named.findall(module.read_text(encoding="utf-8"))})


def test_every_log_event_is_documented() -> None:
    logs, events = read("docs/metrics.md").partition("## Logs")[2], log_events()
    assert events
    assert [event for event in events if f"`{event}`" not in logs] == []


def test_every_route_class_of_metrics_is_documented() -> None:
    assert missing("docs/metrics.md", [f"`{each}`" for each in (*ROUTES.values(), "sessions", "other")]) == []


def own_routes() -> Iterator[str]:
    app = create_app()
    admin = Admin(app.pools, Registrations(None, app.pools), [])
    (dashboard,) = app.layers
    assert isinstance(dashboard, DashboardMiddleware)
    shown = [*dashboard.open_routes(), *dashboard.admin_routes()]
    for route in [*admin.open_routes(), *admin.guarded_routes(), *shown]:
        assert isinstance(route, Route)
        if route.path.startswith(f"{PAGE}/"):  # what the page is made of
            continue
        yield from (
            f"{method} {route.path.replace(':path', '')}" for method in sorted((route.methods or set()) - {"HEAD"})
        )


def test_every_route_of_the_routers_own_is_documented() -> None:
    assert missing("docs/http-api.md", [f"| `{route}` |" for route in own_routes()]) == []


@pytest.fixture(scope="module")
def text_cache(checkpoint: Path) -> RadixTreeMiddleware:
    """The middleware in a router."""
    router = create_app(RouterConfig(hf_checkpoint=str(checkpoint))).router
    return RadixTreeMiddleware(lambda scope, receive, send: None, router=router)  # type: ignore[arg-type]


def is_documented(route: object, middleware: str) -> bool:
    """Whether each method of a route has a line that names this middleware."""
    assert isinstance(route, Route)
    lines = read("docs/http-api.md").splitlines()
    methods = (route.methods or set()) - {"HEAD"}
    rows = [
        line.split(" | ") for method in methods for line in lines if line.startswith(f"| `{method} {route.path}` |")
    ]
    return len(rows) == len(methods) and all(f"`{middleware}`" in row[1].split(", ") for row in rows)


def test_every_route_of_a_middleware_is_documented(text_cache: RadixTreeMiddleware) -> None:
    assert [route for route in text_cache.routes() if not is_documented(route, "RadixTreeMiddleware")] == []


@pytest.mark.parametrize(
    ("middleware", "page"),
    [
        (RadixTreeMiddleware, "docs/text-rollouts.md"),
        (OpenAISessionMiddleware, "docs/sessions-reference.md"),
        (RoutedExpertsMiddleware, "docs/moe-r3.md"),
    ],
)
def test_every_option_of_a_middleware_is_documented_with_its_default(middleware: type, page: str) -> None:
    for name, option in inspect.signature(middleware).parameters.items():
        if name not in ("app", "router"):
            default = "none" if option.default in ("", ()) else str(option.default).lower()
            assert f"| `{name}` | {default} |" in read(page)


def test_every_route_of_the_sessions_is_documented(checkpoint: Path) -> None:
    router = create_app(RouterConfig(hf_checkpoint=str(checkpoint))).router
    sessions = OpenAISessionMiddleware(lambda scope, receive, send: None, router=router)  # type: ignore[arg-type]
    assert [route for route in sessions.routes() if not is_documented(route, "OpenAISessionMiddleware")] == []


@pytest.mark.parametrize("keeper", [RoutedExpertsMiddleware, IndexerTopkMiddleware])
def test_the_route_of_each_kind_of_rows_is_documented(
    checkpoint: Path, keeper: type[RoutedExpertsMiddleware | IndexerTopkMiddleware]
) -> None:
    router = create_app(RouterConfig(hf_checkpoint=str(checkpoint))).router
    (route,) = keeper(lambda scope, receive, send: None, router=router).routes()  # type: ignore[arg-type]
    assert isinstance(route, Route)
    assert f"| `POST {route.path}` | `{keeper.__name__}` |" in read("docs/http-api.md")


def test_every_field_of_a_retrieval_is_documented() -> None:
    assert missing("docs/text-rollouts.md", [f"| `{field}` |" for field in FIELDS_OF_RETRIEVAL]) == []


def test_every_field_of_a_retrievals_answer_is_documented() -> None:
    answer = orjson.loads(b"".join(Retrieved(Trajectory(), "text", 0).json_parts()))
    rows = read("docs/text-rollouts.md").partition("| field of the answer |")[2].partition("\n\n")[0]
    named = {name for row in rows.splitlines() for name in re.findall(r"`(\w+)`", row[1:].partition("|")[0])}
    masks = {"sampling_mask", "sampling_logprobs", "sampling_mask_missing"}
    assert {*answer, *masks} == named


def test_every_reason_for_passing_through_is_documented() -> None:
    assert missing("docs/metrics.md", [f"`{reason}`" for reason in reasons()]) == []


def test_every_name_that_frameworks_use_is_documented() -> None:
    rows = [f"| `{name}` | `{NAMES.get(name, 'middlewares')}` |" for name in (*NAMES, *MIDDLEWARE_PATHS)]
    assert missing("docs/configuration.md", rows) == []


MODULES = [path.name for path in (ROOT / "miles_router").glob("*.py") if path.name != "__init__.py"]
PACKAGES = [f"{path.parent.name}/" for path in (ROOT / "miles_router").glob("*/__init__.py")]


def test_every_module_has_its_line_in_the_architecture() -> None:
    rows = "\n".join(line for line in read("docs/architecture.md").splitlines() if line.startswith("| "))
    assert len(MODULES) > 5 < len(PACKAGES)
    assert [name for name in MODULES + PACKAGES if f"`{name}`" not in rows] == []


def test_the_architecture_names_classes_and_methods_that_exist() -> None:
    named, methods = re.findall(r"`([A-Z]\w+)(?:\.(\w+))?`", read("docs/architecture.md")), dict[str, set[str]]()
    sources = [
        each.read_text(encoding="utf-8")
        for name in ("miles_router", "middleware_hub")
        for each in (ROOT / name).rglob("*.py")
    ]
    defines = re.compile(rf"^class ({'|'.join({name for name, _ in named})})\b", re.MULTILINE)
    for node in (each for source in sources if defines.search(source) for each in ast.walk(ast.parse(source))):
        if isinstance(node, ast.ClassDef):
            functions = (ast.FunctionDef, ast.AsyncFunctionDef)
            own = {each.name for each in node.body if isinstance(each, functions)}
            methods[node.name] = methods.get(node.name, set()) | own
    assert len(named) > 15
    assert [each for each in named if each[0] not in methods or (each[1] and each[1] not in methods[each[0]])] == []


def test_every_subcommand_is_documented() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    commands = [name for name in (*cli.ACTIONS, *cli.APART) if name != "run"]
    assert commands
    assert [name for name in commands if f"miles-router {name}" not in text] == []
