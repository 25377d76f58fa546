"""The engines' metrics in one Prometheus text, in the form of the SGLang gateway's `/engine_metrics`.

Each sample has a label with the URL of its worker, and `:` in names becomes `_`. Values are neither summed nor
interpolated: a worker that does not answer in time has no samples, and a comment names it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from miles_router.control.fan_out import FanOut, Outcome
from miles_router.engines.known import USUAL
from miles_router.errors import NoWorkerAvailable, PartlyFailed
from miles_router.fleet.workers import Worker, WorkerState
from miles_router.forwarding.forwarded import Outgoing

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABEL = "worker_addr"


async def engine_metrics(workers: Iterable[Worker], fan_out: FanOut, timeout: float) -> str:
    """Return the metrics of all workers that are not quarantined and answer within `timeout` seconds.

    Raises:
        NoWorkerAvailable: no worker is registered, or all are quarantined.
        PartlyFailed: no worker answered.
    """
    asked = [worker for worker in workers if worker.state is not WorkerState.QUARANTINED]
    if not asked:
        raise NoWorkerAvailable("no worker is registered, or all are quarantined")
    outcomes = await asyncio.gather(*(fan_out.ask_one(worker, _request(worker), timeout) for worker in asked))
    if not any(outcome.ok for outcome in outcomes):
        raise PartlyFailed(f"no worker returned its metrics: {_refusals(outcomes)}")
    texts = {outcome.worker.url: outcome.body.decode("utf-8", "replace") for outcome in outcomes if outcome.ok}
    merged, unreadable = await asyncio.to_thread(merge, texts, LABEL)  # hundreds of engines send megabytes
    missing = {outcome.worker.url: _refusals([outcome]) for outcome in outcomes if not outcome.ok}
    comments = [f"# no metrics of {url}: {reason}\n" for url, reason in {**missing, **unreadable}.items()]
    return merged + "".join(comments)


def _request(worker: Worker) -> Outgoing:
    return Outgoing("GET", (worker.engine or USUAL).metrics.encode("ascii"), [(b"accept", b"text/plain")], b"")


class _Families(Collector):
    """A collector that returns given metric families, for `generate_latest`."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def merge(texts: Mapping[str, str], label: str) -> tuple[str, dict[str, str]]:
    """Merge Prometheus texts into one, with each metric family once.

    Every sample gets the label `label` with the key of its text. A sample that has the label already keeps its own: the
    worker may itself be a router.

    Returns:
        The merged text, and by key the reason why a text was left out (it is not valid Prometheus).
    """
    families: dict[str, Metric] = {}
    unreadable: dict[str, str] = {}
    for key, text in texts.items():
        try:
            own = list(text_string_to_metric_families(text))
        except ValueError as error:
            unreadable[key] = f"not a Prometheus text: {str(error)[:200]!r}"
            continue
        for family in own:
            name = family.name.replace(":", "_")
            merged = families.setdefault(name, Metric(name, family.documentation, family.type))
            merged.samples += [
                sample._replace(name=sample.name.replace(":", "_"), labels={label: key, **sample.labels})
                for sample in family.samples
            ]
    return generate_latest(_Families(families.values())).decode(), unreadable


def _refusals(outcomes: Sequence[Outcome]) -> str:
    return ", ".join(str(outcome.status or outcome.body.decode(errors="replace")) for outcome in outcomes)
