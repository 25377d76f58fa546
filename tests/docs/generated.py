"""The tables that pages show between markers, made from code and data: `python -m tests.docs.generated` rewrites them.

<!-- generated: settings -->  ...  <!-- end -->
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import partial

import miles_router.app  # noqa: F401
from middleware_hub.openai_session.statistics import SessionStatistics
from middleware_hub.radix_tree.statistics import ArchiveStatistics, CacheStatistics
from middleware_hub.routed_experts.statistics import ExpertStatistics, PositionStatistics
from middleware_hub.tokenizing.async_encoder import EncodingStatistics
from middleware_hub.traces.provider import SpanStatistics
from miles_router.engines.control import SLOW
from miles_router.engines.known import CLIENT_PATHS, CONTROL
from miles_router.generation.attempt import ResumeStatistics
from miles_router.metrics import ClientStatistics, GateStatistics, LoopDelay, Metrics, StateStatistics, Statistics
from miles_router.pools.discovery import DiscoveryStatistics
from miles_router.settings.config import ENVIRONMENT_PREFIX, FIELDS, PATHS, RouterConfig, shown, type_name
from miles_router.shards.forwarding import ForwardStatistics
from miles_router.shards.merged_view import ShardStatistics
from tests.clients.table import CLIENTS
from tests.docs.pages import PAGES, anchor, guarantee_tests, guarantees, name_of
from tests.gpu.fit import ERRORS, REPORT, step_errors
from tests.gpu.fit import errors as errors_of_fit
from tests.support.simulated.costs.gpu import GPUS, QWEN3_30B_A3B_H100

Rows = list[tuple[str, ...]]

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
        flag = given.replace("_", "-")
        flags = f"`--{flag}`, `--no-{flag}`" if isinstance(spec.default, bool) else f"`--{flag}`"
        spellings = [f"`{name}`", flags, f"`{ENVIRONMENT_PREFIX}{given.upper()}`"]
        kind = "list of paths" if name == "middlewares" else type_name(name)
        default = f"{kind}<br>default: {shown(RouterConfig(), name)}"
        rows.append(("<br>".join(spellings), default, spec.metadata["help"]))
    return table(("YAML key, flag, environment", "type", "meaning"), rows)


def metrics(*classes: type[Statistics]) -> str:
    """Every metric that these classes declare, with its labels."""
    rows: Rows = []
    for each in (family for declared in classes for family in declared.descriptions()):
        rows.append((f"`{each.name}`", each.kind, ", ".join(sorted(each.labels)) or "none", each.help))
    return table(("name", "type", "labels", "meaning"), rows)


def fan_out() -> str:
    """Every endpoint that goes to all workers."""
    rows: Rows = []
    for each in CONTROL.values():
        patience = f"{each.timeout / 60:g} min" if each.timeout == SLOW else f"{each.timeout:g} s"
        rows.append((f"`{each.path}`", ", ".join(each.methods), patience))
    return table(("path", "methods", "a worker may take"), rows)


def client_paths() -> str:
    """What the clients' key opens of an engine."""
    beneath = {path.rstrip("/") for path in CLIENT_PATHS if path.endswith("/")}
    rows: Rows = [
        (f"`{path}`", "all" if path in beneath else "nothing")
        for path in sorted(CLIENT_PATHS)
        if not path.endswith("/")
    ]
    return table(("path", "beneath it"), rows)


def clients() -> str:
    """What sessions make of the agents that they are tried with."""
    rows: Rows = []
    for each in CLIENTS:
        segments = f"{each.segments}: {each.why}" if each.why else str(each.segments)
        rows.append((each.name, each.packages, each.api, each.works, segments, f"yes: `{each.test}`"))
    return table(("agent", "version", "API", "works", "segments", "exact"), rows)


def gpu_prices() -> str:
    """Every GPU of the cost model."""
    rows: Rows = [
        ("a prefill", *(f"{gpu.prefill_s * 1e3:.4g} ms" for gpu in GPUS.values())),
        ("each token that it computes", *(f"{gpu.prefill_token_s * 1e6:.4g} us" for gpu in GPUS.values())),
        ("each pair of it and a token before it", *(f"{gpu.prefill_pair_s * 1e9:.4g} ns" for gpu in GPUS.values())),
        ("a decode step", *(f"{gpu.decode_s * 1e3:.4g} ms" for gpu in GPUS.values())),
        ("each sequence in it", *(f"{gpu.decode_sequence_s * 1e6:.4g} us" for gpu in GPUS.values())),
        ("each token in the sequences' contexts", *(f"{gpu.decode_context_s * 1e9:.4g} ns" for gpu in GPUS.values())),
        ("room for keys and values of so many tokens", *(f"{gpu.kv_tokens:,}" for gpu in GPUS.values())),
    ]
    return table(("what", *(f"`{name}`" for name in GPUS)), rows)


def gpu_errors() -> str:
    """How far the GPU that we fitted is from what was measured."""
    return table(ERRORS, [*errors_of_fit(json.loads(REPORT.read_text()), QWEN3_30B_A3B_H100)])


def gpu_step_errors() -> str:
    """The same for each decode step."""
    heading, *rows = step_errors(json.loads(REPORT.read_text()), QWEN3_30B_A3B_H100)
    return table(heading, rows)


def guarantees_shown() -> str:
    """Return the tests of every guarantee, beneath its heading."""
    tests, lines = guarantee_tests(), list[str]()
    for section, headings in guarantees().items():
        lines.append(f"## {section}")
        for heading in headings:
            lines.append(f"### [{heading}](guarantees.md#{anchor(heading)})")
            lines.append("\n".join(f"- `{test}`" for test in tests[anchor(heading)]))
    return "\n" + "\n\n".join(lines) + "\n\n"


TABLES: dict[str, Callable[[], str]] = {
    "settings": settings,
    "metrics": partial(
        metrics,
        Metrics,
        LoopDelay,
        GateStatistics,
        ClientStatistics,
        ForwardStatistics,
        StateStatistics,
        DiscoveryStatistics,
        ShardStatistics,
    ),
    "fan_out": fan_out,
    "client_paths": client_paths,
    "clients": clients,
    "guarantees": guarantees_shown,
    "gpu_prices": gpu_prices,
    "gpu_errors": gpu_errors,
    "gpu_step_errors": gpu_step_errors,
    "text_cache": partial(metrics, CacheStatistics),
    "text_archive": partial(metrics, ArchiveStatistics),
    "sessions": partial(metrics, SessionStatistics),
    "traces": partial(metrics, SpanStatistics),
    "partial_rollouts": partial(metrics, ResumeStatistics),
    "encoding": partial(metrics, EncodingStatistics),
    "routed_experts": partial(metrics, ExpertStatistics),
    "indexer_topk": partial(metrics, PositionStatistics),
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
