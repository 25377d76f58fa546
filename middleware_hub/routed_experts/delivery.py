"""`POST /routed_experts`: the rows of one trajectory, for the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from starlette.requests import Request
from starlette.responses import Response

from middleware_hub.routed_experts.decoding import encoded
from middleware_hub.routed_experts.errors import ExpertsNotHeld
from middleware_hub.routed_experts.store import ExpertStore
from miles_router import Exchange
from miles_router.errors import BadRequest, NotFound
from miles_router.middlewares.experts import Experts, Found, Source, Taken
from miles_router.trajectory import InvalidTrajectory
from miles_router.trajectory.safetensors import pack

BINARY = "application/octet-stream"
FIELD = "routed_experts"
COMMON = ("format", "start", "stop")
#: Rows of more bytes are put into their form in a thread.
OFF_LOOP = 1 << 20

Array = npt.NDArray[np.unsignedinteger[Any]]


class Delivery:
    """Answers from what is held under ids, and from the layers that hold trajectories."""

    def __init__(self, store: ExpertStore, experts: Experts) -> None:
        self._store = store
        self._experts = experts

    async def answer(self, request: Request) -> Response:
        """Rows `[start, stop)` of one trajectory in one of the formats.

        Raises:
            BadRequest: a field is missing, unknown or of the wrong type, or the range is none.
            NotFound, ExpertsNotHeld: there is no such trajectory, or nothing is held of it.
        """
        exchange = Exchange.of(request.scope)
        asked = exchange.loads(await exchange.read(request.receive))
        if not isinstance(asked, Mapping):
            raise BadRequest("the request body must be a JSON object")
        form = asked.get("format", "raw")
        if not isinstance(form, str) or form not in FORMATS:
            raise BadRequest(f"format must be one of {', '.join(FORMATS)}")
        found = self._find(asked)
        start, stop = _range(asked, max(found.tokens - 1, 0))
        rows, reason = found.taken
        if rows is None:
            raise ExpertsNotHeld(f"no routed experts are held of it: {reason}")
        try:
            array = self._experts.array(rows, start, stop)
        except InvalidTrajectory as error:
            raise ExpertsNotHeld(str(error)) from None
        headers = {"X-Dtype": array.dtype.name, "X-Shape": ",".join(map(str, array.shape)), "X-Start": str(start)}
        if found.rid is not None and found.rid.isascii() and found.rid.isprintable():
            headers["X-Rid"] = found.rid
        write = FORMATS[form]
        body = write(array, start) if array.nbytes < OFF_LOOP else await asyncio.to_thread(write, array, start)
        return Response(body, media_type="application/json" if form == "json" else BINARY, headers=headers)

    def _find(self, asked: Mapping[str, Any]) -> Found:
        sources: dict[str, Source] = {"rid": Source(self._by_rid), **self._experts.sources}
        named = [name for name in sources if asked.get(name) is not None]
        if len(named) != 1:
            raise BadRequest(f"exactly one of {', '.join(sources)} is required")
        source = sources[named[0]]
        known = (named[0], *source.fields, *COMMON)
        if unknown := asked.keys() - set(known):
            raise BadRequest(f"unknown field {min(unknown)!r}; known with {named[0]} are {', '.join(known)}")
        if not isinstance(asked[named[0]], str):
            raise BadRequest(f"{named[0]} must be a string")
        return source.find(asked)

    def _by_rid(self, asked: Mapping[str, Any]) -> Found:
        rows = self._store.by_rid(asked["rid"])
        if rows is None:
            raise NotFound(f"no routed experts of a generation {asked['rid']!r} are held")
        return Found(Taken(rows), len(rows) + 1, asked["rid"])


def _range(asked: Mapping[str, Any], rows: int) -> tuple[int, int]:
    start, stop = asked.get("start", 0), asked.get("stop", rows)
    for name, value in (("start", start), ("stop", stop)):
        if type(value) is not int:
            raise BadRequest(f"{name} must be a whole number")
    if not 0 <= start <= stop <= rows:
        raise BadRequest(f"rows {start} to {stop} are not within the {rows} of this trajectory")
    return start, stop


def _raw(array: Array, _: int) -> bytes | memoryview:
    whole = np.ascontiguousarray(array)
    return whole.reshape(-1).view(np.uint8).data


def _safetensors(array: Array, start: int) -> bytes:
    return pack({FIELD: array}, {"start": str(start)})


def _json(array: Array, start: int) -> bytes:
    data = encoded(array).decode("ascii")
    return orjson.dumps({FIELD: data, "dtype": "int32", "shape": list(array.shape), "start": start})


FORMATS: Mapping[str, Callable[[Array, int], bytes | memoryview]] = {
    "raw": _raw,
    "safetensors": _safetensors,
    "json": _json,
}
