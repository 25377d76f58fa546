"""The tables that pages show between markers, made from the code: `python -m tests.docs.generated` rewrites them.

<!-- generated: settings -->  ...  <!-- end -->
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

import miles_router.app  # noqa: F401
from middleware_hub.openai_session.sessions.messages import strict
from middleware_hub.openai_session.sessions.store import Bounds, SessionStore
from middleware_hub.openai_session.statistics import SessionCollector
from middleware_hub.openai_session.turns.recording import Recorder
from middleware_hub.radix_tree.cache import RadixTreeCache
from middleware_hub.radix_tree.statistics import CacheCollector
from middleware_hub.routed_experts.errors import ExpertsMissing  # noqa: F401  # so that it is in the table
from middleware_hub.routed_experts.statistics import ExpertsCollector
from middleware_hub.routed_experts.store import ExpertStore
from middleware_hub.tokenizing.encoding import InexactTokenizer
from miles_router.control.fan_out import SLOW
from miles_router.control.table import TABLE
from miles_router.errors import ClientDisconnected, ConfigError, RouterError, UpstreamBroken
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.metrics import Metrics
from miles_router.settings.config import ENVIRONMENT_PREFIX, FIELDS, PATHS, RouterConfig, shown, type_name
from tests.docs.pages import PAGES, name_of
from tests.support.quiet_fleet import quiet_fleet

Rows = list[tuple[str, ...]]

#: Where the class says less, or something else, than a reader of an answer needs.
STATUS = {ClientDisconnected: "not sent", UpstreamBroken: "broken off, or 502"}
MEANING = {
    RouterError: "A defect of the router or of a middleware; the log has its traceback.",
    InexactTokenizer: "`RadixTreeMiddleware` cannot encode what continues a recorded text: this tokenizer would change "
    "the text in front of it.",
}

_MARKED = re.compile(r"(<!-- generated: (?P<name>\w+) -->\n)(?P<text>.*?)(<!-- end -->)", re.DOTALL)


def table(heading: tuple[str, ...], rows: Rows) -> str:
    """A Markdown table."""
    lines = [heading, tuple("---" for _ in heading), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def settings() -> str:
    """Every setting in its three spellings."""
    rows: Rows = []
    for name, spec in FIELDS.items():
        given = PATHS if name == "middlewares" else name
        spellings = [f"`{name}`", f"`--{given.replace('_', '-')}`", f"`{ENVIRONMENT_PREFIX}{given.upper()}`"]
        kind = "list of paths" if name == "middlewares" else type_name(name)
        default = f"{kind}<br>default: {shown(RouterConfig(), name)}"
        rows.append(("<br>".join(spellings), default, spec.metadata["help"]))
    return table(("YAML key, flag, environment", "type", "meaning"), rows)


def error_classes(base: type[RouterError] = RouterError) -> Iterator[type[RouterError]]:
    """Every error of ours with an answer of its own, from the root of the tree; not those that tests define."""
    yield base
    # Its own module's first, then by module: not in the order in which modules happened to be imported.
    for each in sorted(base.__subclasses__(), key=lambda each: (each.__module__ != base.__module__, each.__module__)):
        ours = each.__module__.startswith(("miles_router.", "middleware_hub."))
        if each is not ConfigError and ours and "type" in vars(each):  # without one it never leaves the router
            yield from error_classes(each)


def errors() -> str:
    """Every error that a client can be answered with."""
    rows: Rows = []
    for each in error_classes():
        text = MEANING.get(each) or " ".join((each.__doc__ or "").split())
        headers = "".join(f" Sent with `{name}: {value}`." for name, value in each.headers.items())
        rows.append((f"`{each.type}`", STATUS.get(each, str(each.status)), text + headers))
    return table(("type", "status", "when"), rows)


def exposition() -> str:
    """`GET /metrics` of a router that has seen something of everything."""
    fleet = quiet_fleet()
    metrics = Metrics(fleet)
    worker = fleet.pool.add(parse_worker_url("http://127.0.0.1:30001"))
    metrics.finished("/generate", 200, worker.url, 1.0, 0.5)
    return metrics.render().decode()


def metrics() -> str:
    """Every metric, with its labels."""
    rows: Rows = []
    for family in text_string_to_metric_families(exposition()):
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        name = f"{family.name}_total" if family.type == "counter" else family.name
        rows.append((f"`{name}`", family.type, ", ".join(labels) or "none", family.documentation))
    return table(("name", "type", "labels", "meaning"), rows)


def fan_out() -> str:
    """Every endpoint that goes to all workers."""
    rows: Rows = []
    for row in TABLE:
        patience = f"{row.timeout / 60:g} min" if row.timeout == SLOW else f"{row.timeout:g} s"
        rows.append((f"`{row.path}`", ", ".join(row.methods), patience))
    return table(("path", "methods", "a worker may take"), rows)


def text_cache() -> str:
    """Every metric of the text cache."""
    cache = RadixTreeCache(max_tokens=1, keep_versions=1)
    cache.statistics.passed_through["reason"] = 1
    return _families(CacheCollector(cache))


def sessions() -> str:
    """Every metric of the sessions."""
    store = SessionStore(Bounds(1, 1, 1, 1, 0.0), now=lambda: 0.0)
    recorder = Recorder(store, strict, is_special=lambda token: False, now=lambda: 0.0)
    return _families(SessionCollector(store, recorder))


def routed_experts() -> str:
    """Every metric of routed experts."""
    store = ExpertStore(1)
    store.statistics.missing["reason"] = 1
    return _families(ExpertsCollector(store))


def _families(collector: Collector) -> str:
    rows: Rows = []
    for each in collector.collect():
        name = f"{each.name}_total" if each.type == "counter" else each.name
        labels = ", ".join(sorted(each.samples[0].labels)) or "none"
        rows.append((f"`{name}`", each.type, labels, each.documentation))
    return table(("name", "type", "labels", "meaning"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "settings": settings,
    "errors": errors,
    "metrics": metrics,
    "fan_out": fan_out,
    "text_cache": text_cache,
    "sessions": sessions,
    "routed_experts": routed_experts,
}


def regenerated(text: str) -> str:
    """A page with its tables as the code has them now."""
    return _MARKED.sub(lambda found: f"{found[1]}{TABLES[found['name']]()}{found[4]}", text)


def marked(text: str) -> list[str]:
    """The tables that a page shows."""
    return [found["name"] for found in _MARKED.finditer(text)]


def main() -> None:
    """Rewrite every page whose tables are out of date."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (new := regenerated(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(f"{name_of(page)} rewritten", file=sys.stderr)


if __name__ == "__main__":
    main()
