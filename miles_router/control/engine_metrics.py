"""The engines' own metrics in one text, in the form of the SGLang gateway's `/engine_metrics`: every sample has a label
with the worker that said it, and names have `_` for `:`.

Values are neither summed nor made up: a worker that does not answer in time has no samples, and a comment names it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence

from miles_router.control.fan_out import FanOut, Outcome
from miles_router.engines.known import USUAL
from miles_router.errors import NoWorkerAvailable, PartlyFailed
from miles_router.fleet.workers import Worker, WorkerState
from miles_router.forwarding.outgoing import Outgoing

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABEL = "worker_addr"
#: A sample: name, labels with their braces or none, the rest.
SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?(\s+(?:[-+]?[\d.]\S*|[-+]?Inf|NaN)(?:\s+-?\d+)?)")
ABOUT = re.compile(r"# (?:HELP|TYPE) ([A-Za-z_:][\w:]*)")


async def engine_metrics(workers: Iterable[Worker], fan_out: FanOut, timeout: float) -> str:
    """What every one of these workers that is not quarantined says about itself within `timeout` seconds.

    Raises:
        NoWorkerAvailable: there is none.
        PartlyFailed: none of them answered.
    """
    asked = [worker for worker in workers if worker.state is not WorkerState.QUARANTINED]
    if not asked:
        raise NoWorkerAvailable("no worker is registered that answers")
    outcomes = await asyncio.gather(*(fan_out.ask_one(worker, _request(worker), timeout) for worker in asked))
    if not any(outcome.ok for outcome in outcomes):
        raise PartlyFailed(f"no worker gave its metrics: {_refusals(outcomes)}")
    texts = {outcome.worker.url: outcome.body.decode("utf-8", "replace") for outcome in outcomes if outcome.ok}
    merged = await asyncio.to_thread(merge, texts, LABEL)  # hundreds of engines have megabytes
    silent = [outcome for outcome in outcomes if not outcome.ok]
    return merged + "".join(f"# no metrics of {outcome.worker.url}: {_refusals([outcome])}\n" for outcome in silent)


def _request(worker: Worker) -> Outgoing:
    return Outgoing("GET", (worker.engine or USUAL).metrics.encode("ascii"), [(b"accept", b"text/plain")], b"")


def merge(texts: Mapping[str, str], label: str) -> str:
    """Join Prometheus texts: each family once, with the samples of all. Each sample gets a `label` with the name of the
    text that it comes from. Pure."""
    families: dict[str, tuple[dict[str, None], list[str]]] = {}  # the lines about it, once each; its samples
    for who, text in texts.items():
        family = ""
        for line in text.splitlines():
            if about := ABOUT.match(line):
                family = about[1]
                lines, _ = families.setdefault(family, ({}, []))
                if not any(line[:6] == known[:6] for known in lines):  # HELP and TYPE of the first
                    lines[line.replace(family, _name(family), 1)] = None
            elif sample := SAMPLE.fullmatch(line):
                name, labels, rest = sample.groups()
                own = family if family and name.startswith(family) else name
                families.setdefault(own, ({}, []))[1].append(f"{_name(name)}{{{_labelled(labels, label, who)}}}{rest}")
    return "".join(f"{line}\n" for lines, samples in families.values() for line in (*lines, *samples))


def _name(name: str) -> str:
    return name.replace(":", "_")


def _labelled(labels: str | None, label: str, name: str) -> str:
    """Add a label to a sample's labels, unless it has one: a worker may itself be a router, which has added it."""
    if labels and re.search(rf'(?:^|,)\s*{label}="', labels):
        return labels
    return f'{labels.rstrip(", ")},{label}="{name}"' if labels and labels.strip() else f'{label}="{name}"'


def _refusals(outcomes: Sequence[Outcome]) -> str:
    return ", ".join(str(outcome.status or outcome.body.decode(errors="replace")) for outcome in outcomes)
