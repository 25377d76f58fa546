"""`POST /routed_experts`, `POST /indexer_topk`: the rows of one trajectory, for the trainer."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response

from middleware_hub.routed_experts.decoding import encoded
from middleware_hub.routed_experts.errors import KNOWN, RowsNotHeld
from middleware_hub.routed_experts.store import RowStore
from miles_router.errors import BadRequest, NotFound
from miles_router.middlewares import Exchange, Scope
from miles_router.middlewares.rows import RowChannel, RowMatch, RowSource, TrajectoryRows
from miles_router.middlewares.state import Owners
from miles_router.trajectory import InvalidTrajectory
from miles_router.trajectory.rows import AlignedRows, RowArray
from miles_router.trajectory.safetensors import pack

BINARY = "application/octet-stream"
#: Headers to pass on from another process's answer.
SHOWN = frozenset({"content-type", "x-rid", "x-dtype", "x-shape", "x-start"})
COMMON = ("format", "start", "stop")
#: Rows with more ids than this are serialized in a thread.
OFF_LOOP = 1 << 20


class Delivery:
    """The handler of the route. It finds rows by generation id, or by a name in a layer that holds trajectories."""

    def __init__(self, store: RowStore, channel: RowChannel, owners: Owners) -> None:
        self._owners = owners
        self._store = store
        self._channel = channel

    async def answer(self, request: Request) -> Response:
        """Return rows `[start, stop)` of one trajectory in the requested format.

        Raises:
            BadRequest: a field is missing, unknown or of the wrong type, or the range is invalid.
            NotFound: the trajectory is unknown.
            RowsNotHeld: the trajectory is known, its rows are not in memory.
        """
        exchange = Exchange.of(request.scope)
        asked = await exchange.read(request.receive)
        query = exchange.loads(asked)
        if not isinstance(query, Mapping):
            raise BadRequest("the request body must be a JSON object")
        form = query.get("format", "raw")
        if not isinstance(form, str) or form not in FORMATS:
            raise BadRequest(f"format must be one of {', '.join(FORMATS)}")
        source, name = self._source(query)
        if source.require is not None:
            await source.require(request.scope, name)
        if source.bring is not None:
            await source.bring(name)
        try:
            match = source.find(query)
        except NotFound:
            found = None if source.require is not None else await self._ask_others(request.scope, asked)
            if found is None:
                raise
            return found
        start, stop = _range(query, max(match.tokens - 1, 0))
        kind, (rows, reason) = self._store.kind, match.rows
        if rows is None:
            raise RowsNotHeld(f"no {kind.title} of this trajectory are in memory: {reason}")
        write = functools.partial(self._written, form, rows, start, stop)
        small = (stop - start) * (rows.width or 0) < OFF_LOOP
        headers, body = write() if small else await asyncio.to_thread(write)
        if match.rid is not None and match.rid.isascii() and match.rid.isprintable():
            headers["X-Rid"] = match.rid
        return Response(body, media_type="application/json" if form == "json" else BINARY, headers=headers)

    def _written(
        self, form: str, rows: AlignedRows, start: int, stop: int
    ) -> tuple[dict[str, str], bytes | memoryview]:
        """Return headers and body; may run in a thread.

        Raises:
            RowsNotHeld: some rows are missing or evicted.
        """
        kind = self._store.kind
        try:
            array = self._channel.array(rows, start, stop)
        except InvalidTrajectory as error:
            raise RowsNotHeld(str(error)) from None
        headers = {"X-Dtype": array.dtype.name, "X-Shape": ",".join(map(str, array.shape)), "X-Start": str(start)}
        return headers, FORMATS[form](kind.name, array, start)

    async def _ask_others(self, scope: Scope, body: bytes) -> Response | None:
        """Return the answer of the first other process that knows the trajectory, or None."""
        for other in self._owners.others(scope):
            status, headers, found = await self._owners.ask(other, scope, body)
            if status != NotFound.status or KNOWN in headers:
                shown = {name: value for name, value in headers.items() if name in SHOWN}
                return Response(found, status, headers=shown)
        return None

    def _source(self, query: Mapping[str, Any]) -> tuple[RowSource, str]:
        sources: dict[str, RowSource] = {"rid": RowSource(self._by_rid, bring=self._load), **self._channel.sources}
        names = [name for name in sources if query.get(name) is not None]
        if len(names) != 1:
            raise BadRequest(f"exactly one of {', '.join(sources)} is required")
        name = names[0]
        known = (name, *sources[name].fields, *COMMON)
        if unknown := query.keys() - set(known):
            raise BadRequest(f"unknown field {min(unknown)!r}; known fields with {name} are {', '.join(known)}")
        if not isinstance(query[name], str):
            raise BadRequest(f"{name} must be a string")
        return sources[name], query[name]

    async def _load(self, rid: str) -> None:
        if self._channel.bring_rid is not None and self._store.by_rid(rid) is None:
            await self._channel.bring_rid(rid)

    def _by_rid(self, query: Mapping[str, Any]) -> RowMatch:
        rows = self._store.by_rid(query["rid"])
        if rows is None:
            raise NotFound(f"no {self._store.kind.title} of generation {query['rid']!r} are in memory")
        return RowMatch(TrajectoryRows(rows), len(rows) + 1, query["rid"])


def _range(query: Mapping[str, Any], rows: int) -> tuple[int, int]:
    start, stop = query.get("start", 0), query.get("stop", rows)
    for name, value in (("start", start), ("stop", stop)):
        if type(value) is not int:
            raise BadRequest(f"{name} must be a whole number")
    if not 0 <= start <= stop <= rows:
        raise BadRequest(f"rows {start} to {stop} are out of range: this trajectory has {rows} rows")
    return start, stop


def _raw(name: str, array: RowArray, start: int) -> bytes | memoryview:
    whole = np.ascontiguousarray(array)
    return whole.reshape(-1).view(np.uint8).data


def _safetensors(name: str, array: RowArray, start: int) -> bytes:
    return pack({name: array}, {"start": str(start)})


def _json(name: str, array: RowArray, start: int) -> bytes:
    about = orjson.dumps({"dtype": "int32", "shape": list(array.shape), "start": start})
    return b"".join((b'{"%b":"' % name.encode("ascii"), encoded(array), b'",', about[1:]))


#: How each format writes an array, given the kind's name, the array and the number of its first row.
FORMATS: Mapping[str, Callable[[str, RowArray, int], bytes | memoryview]] = {
    "raw": _raw,
    "safetensors": _safetensors,
    "json": _json,
}
