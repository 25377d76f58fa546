"""A paused or sleeping fleet's state as JSON, for other router processes and for the next start after a restart."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from miles_router.engines.actions import Order, Pause
from miles_router.fleet.fleet import Fleet


def dump_standstill(fleet: Fleet) -> dict[str, Any]:
    """Return the router's own pause, the released memory parts, the sleeping workers, and the orders sent to them."""
    return {
        "pause": None if fleet.pause is None else fleet.pause.mode,
        "released": sorted(fleet.released),
        "slept": sorted(fleet.slept),
        "memory_orders": [[each.method, _text(each.target), _text(each.body)] for each in fleet.memory_orders],
    }


def restore_standstill(fleet: Fleet, record: Mapping[str, Any]) -> None:
    """Restore the state that `dump_standstill` wrote into a fleet. The gate is not changed."""
    fleet.pause = None if record["pause"] is None else Pause(record["pause"])
    fleet.released, fleet.slept = set(record["released"]), set(record["slept"])
    orders = record["memory_orders"]
    fleet.memory_orders = [Order(method, _bytes(target), _bytes(body)) for method, target, body in orders]


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
