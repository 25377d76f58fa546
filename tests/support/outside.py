"""What a router of several processes shows, under the names that a router in the test's own process has inside.

`router.app.router.gate.held`, `router.pool.in_flight`, `router.worker(...).state`: each look asks the router, and waits
for its answer. Whatever is not shown has no name here; who asks for that is told by `hidden`, which does not return.
"""

from __future__ import annotations

import json
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from prometheus_client.parser import text_string_to_metric_families

from miles_router.fleet.workers import WorkerState
from miles_router.metrics.metrics import Metrics

#: Seconds for one answer.
LONG = 60.0


class Outside:
    """Asks a router at `url`; `key` is its key of administration."""

    def __init__(self, url: str, key: str | None, hidden: Callable[[str], NoReturn]) -> None:
        self._url = url
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.hidden = hidden

    def text(self, path: str) -> str:
        """What a GET is answered. The test's loop stands still meanwhile, as if it had looked inside."""
        request = urllib.request.Request(self._url + path, headers=self._headers)
        with urllib.request.urlopen(request, timeout=LONG) as answer:
            return str(answer.read(), "utf-8")

    @property
    def info(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.text("/router/info"))
        return found

    @property
    def app(self) -> Shown:
        parts = {"gate": Gate, "pool": Pool, "metrics": Counters, "statistics": Numbers}
        return Shown(self, router=Shown(self, **{name: part(self) for name, part in parts.items()}))


class Shown:
    """Has some names, and nothing can be set."""

    def __init__(self, outside: Outside, **names: Any) -> None:
        self.__dict__.update(names, _outside=outside)

    def __getattr__(self, name: str) -> Any:
        self._outside.hidden(name)

    def __setattr__(self, name: str, value: object) -> None:
        self._outside.hidden(name)


class Gate(Shown):
    @property
    def held(self) -> int:
        return int(self._outside.info["gate"]["held"])

    @property
    def closed(self) -> bool:
        return bool(self._outside.info["gate"]["closed"])


class Pool(Shown):
    @property
    def in_flight(self) -> int:
        return int(self._outside.info["in_flight"])

    @property
    def weight_version(self) -> str | None:
        found: str | None = self._outside.info["weight_version"]
        return found

    def get(self, url: str) -> Worker:
        return Worker(self._outside, url=url)

    def __iter__(self) -> Iterator[Worker]:
        return iter([self.get(each["url"]) for each in self._outside.info["workers"]])

    def __len__(self) -> int:
        return len(self._outside.info["workers"])


class Worker(Shown):
    def __getattr__(self, name: str) -> Any:
        row: dict[str, Any] = next((each for each in self._outside.info["workers"] if each["url"] == self.url), {})
        if name not in row:
            self._outside.hidden(f"{name} of a worker")
        return WorkerState(row[name]) if name == "state" else row[name]


class Counters(Shown):
    def __getattr__(self, name: str) -> Any:
        found = Metrics._declared.get(name)
        declared = found if found is not None and found.kind == "counter" else self._outside.hidden(name)
        families = text_string_to_metric_families(self._outside.text("/metrics"))
        samples = [each for family in families if family.name == declared.family().name for each in family.samples]
        if not declared.by:
            return sum(int(each.value) for each in samples if each.name.endswith("_total"))
        counts = Counter[Any]()
        for each in samples:
            key = tuple(_plain(each.labels[label]) for label in declared.by)
            counts[key if len(key) > 1 else key[0]] += int(each.value)
        return counts


class Numbers(Shown):
    """What layers show, by their names."""

    def __getitem__(self, name: str) -> Callable[[], Any]:
        return lambda: self._outside.info["statistics"][name]


def _plain(label: str) -> object:
    return int(label) if label.isdecimal() else label
