"""What `GET /metrics` says of a router, whichever of its processes have counted it."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.support.http import ask


def samples(text: str, name: str, **labels: str) -> list[Sample]:
    found = [each for family in text_string_to_metric_families(text) for each in family.samples if each.name == name]
    return [each for each in found if labels.items() <= each.labels.items()]


def total(text: str, name: str, **labels: str) -> float:
    return sum(each.value for each in samples(text, name, **labels))


async def metrics(url: str) -> str:
    answer = await ask(url, "GET", "/metrics")
    assert answer.status == 200, answer.body
    return answer.body.decode()


async def metric(router: Any, name: str, **labels: str) -> float:
    """The sum of all samples of a router's name with these labels."""
    return total(await metrics(router.url), name, **labels)
