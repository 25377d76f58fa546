"""The Grafana dashboard shows what the router really exposes: every metric, and every label of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from middleware_hub.openai_session_middleware import OpenAISessionMiddleware
from middleware_hub.radix_tree_middleware import RadixTreeMiddleware
from middleware_hub.routed_experts_middleware import RoutedExpertsMiddleware
from miles_router.app import create_app
from miles_router.settings.config import MiddlewareSpec, RouterConfig
from tests.docs.pages import ROOT, read

DASHBOARD: dict[str, Any] = json.loads((ROOT / "configs" / "grafana-dashboard.json").read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
LAYERS = (OpenAISessionMiddleware, RadixTreeMiddleware, RoutedExpertsMiddleware)
#: Labels that Prometheus adds, and that a histogram's buckets have.
ADDED = {"instance", "le"}
METRIC = re.compile(r"\b(miles_router_\w+)")
SELECTED = re.compile(r"\b(miles_router_\w+)\{([^}]*)\}")
GROUPED = re.compile(r"\bby \(([^)]*)\)")


def expressions() -> Iterator[tuple[str, str]]:
    """What panels ask for, and how they name it."""
    for panel in PANELS:
        for target in panel.get("targets", ()):
            yield target["expr"], target["legendFormat"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["definition"], ""


@pytest.fixture(scope="module")
def exposed(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, set[str]]:
    """The labels of every metric that a router with all layers exposes at `/metrics`, by the name of its samples."""
    specs = tuple(
        MiddlewareSpec(
            f"{each.__module__}.{each.__name__}", {"moe_shape": "2x4x2"} if each is RoutedExpertsMiddleware else {}
        )
        for each in LAYERS
    )
    state = str(tmp_path_factory.mktemp("state"))
    app = create_app(RouterConfig(middlewares=specs, hf_checkpoint=str(checkpoint), state_dir=state, otel=True))
    rendered = app.router.metrics.render().decode()
    documented = dict(
        re.findall(r"^\| `(miles_router_\w+)` \| \w+ \| ([^|]*) \|", read("docs/metrics.md"), re.MULTILINE)
    )
    found: dict[str, set[str]] = {}
    for name, kind in re.findall(r"^# TYPE (\w+) (\w+)$", rendered, re.MULTILINE):
        labels = {label for label in documented[name].split(", ") if label != "none"}
        samples = [name, f"{name}_bucket", f"{name}_sum", f"{name}_count"] if kind == "histogram" else [name]
        found |= dict.fromkeys(samples, labels)
    return found


def test_every_metric_that_it_uses_is_exposed_and_documented(exposed: Mapping[str, set[str]]) -> None:
    used = {name for expression, _ in expressions() for name in METRIC.findall(expression)}
    assert len(used) > 30
    assert used - exposed.keys() == set()


def test_every_label_that_it_uses_is_one_of_the_metric(exposed: Mapping[str, set[str]]) -> None:
    for expression, legend in expressions():
        (name, *more) = dict.fromkeys(METRIC.findall(expression))
        assert more == [], expression
        selected = {
            re.split(r"[=!]", part)[0].strip()
            for _, within in SELECTED.findall(expression)
            for part in within.split(",")
        }
        grouped = {label.strip() for labels in GROUPED.findall(expression) for label in labels.split(",")}
        assert (selected | grouped) - exposed[name] - ADDED == set(), expression
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= grouped, (expression, legend)


def test_it_has_the_form_that_grafana_imports() -> None:
    assert DASHBOARD["schemaVersion"] >= 36
    assert DASHBOARD["title"] == DASHBOARD["uid"] == "miles-router"
    variables = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    source = {"type": "prometheus", "uid": "${datasource}"}
    assert variables["instance"]["datasource"] == source
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        if panel["type"] == "row":
            continue
        assert panel["type"] in ("timeseries", "stat")
        assert panel["title"]
        assert panel["description"]
        assert [panel["datasource"], *(target["datasource"] for target in panel["targets"])] == [source] * (
            len(panel["targets"]) + 1
        )
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
