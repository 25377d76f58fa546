"""Merge the JSON answers of several router processes to `/router/episodes` and `/router/run`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from miles_router.middlewares.episodes import INTERVALS

Json = Mapping[str, Any]


def one_page(pages: Sequence[Json], limit: int, cursor: Callable[[float, str], str]) -> Json:
    """Merge pages that begin at the same cursor into one of the newest `limit` episodes.

    Args:
        cursor: makes the `next` cursor from an episode's `started_at` and id.
    """
    rows = sorted(
        (row for page in pages for row in page["episodes"]),
        key=lambda row: (row["started_at"], row["id"]),
        reverse=True,
    )
    shown = rows[:limit]
    more = len(rows) > limit or any(page["next"] is not None for page in pages)
    following = cursor(shown[-1]["started_at"], shown[-1]["id"]) if more and shown else None
    return {**pages[0], "episodes": shown, "next": following}


def one_run(runs: Sequence[Json]) -> Json:
    """Merge the runs of all processes: counts are added by interval and by weight version."""
    intervals = _sums(
        (each for run in runs for each in run["intervals"]), lambda each: (each["start"], each["weight_version"])
    )
    intervals.sort(key=lambda each: each["start"])
    versions = _sums((each for run in runs for each in run["versions"]), lambda each: each["weight_version"])
    versions.sort(key=lambda each: each["since"])
    order = [each["weight_version"] for each in versions]  # a process may know rewards of newer weights alone

    def rank(each: Json) -> int:
        version = each["weight_version"]
        if version is None:  # unknown version: last
            return len(order)
        return order.index(version) if version in order else -1

    series = {name: [each for run in runs for each in run[name]] for name in ("rewards", "evaluations")}
    rewards = {
        name: sorted(_sums(found, lambda each: each["weight_version"]), key=rank) for name, found in series.items()
    }
    gate = {
        "closed": next((run["gate"]["closed"] for run in runs if run["gate"]["closed"]), runs[0]["gate"]["closed"]),
        "held": sum(run["gate"]["held"] for run in runs),
    }
    forgotten = [each["start"] + runs[0]["interval_s"] for each in intervals[:-INTERVALS][-1:]]
    since = max([*(run["since"] for run in runs), *forgotten])
    counted = {"intervals": intervals[-INTERVALS:], "versions": versions, **rewards}
    return {**runs[0], "since": since, **counted, "gate": gate}


def _sums(counts: Iterable[Json], key: Callable[[Json], Hashable]) -> list[dict[str, Any]]:
    found: dict[Hashable, dict[str, Any]] = {}
    for each in counts:
        name = key(each)
        found[name] = {**each} if name not in found else _sum(found[name], each)
    return list(found.values())


def _sum(one: Json, other: Json) -> dict[str, Any]:
    """Add two records of the same interval or version. Times are not added."""
    return {name: _added(name, value, other[name]) for name, value in one.items()}


def _added(name: str, one: Any, other: Any) -> Any:
    if isinstance(one, Mapping):
        return {each: one.get(each, 0) + other.get(each, 0) for each in {**one, **other}}
    if name == "since":
        return min(one, other)
    return one if name in ("start", "weight_version") else one + other
