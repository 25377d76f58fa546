"""Control of the fleet for a trainer: pause it, change its weights, continue it, list its workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, TypedDict
from urllib.parse import quote, urlencode

import orjson

from miles_router.client.errors import ErrorReply, FanOutFailed, NotConnected
from miles_router.client.transport import Request, Transport

#: What a pause does to running generations: end them with partial output, queue them again, or hold them in place.
PauseMode = Literal["abort", "retract", "in_place"]


class WorkerInfo(TypedDict):
    """One worker as the router sees it; docs/http-api.md explains the fields."""

    id: str
    url: str
    state: str
    reason: str
    since: float
    in_flight: int
    weight_version: str | None
    failures: int
    last_check: float | None


class FleetControl:
    """The methods that need the administration key. They use separate connections: requests that wait for the fleet to
    continue cannot block the request that continues it.

    Methods that ask every worker raise `FanOutFailed` if some worker failed, `ErrorReply` if all workers or the router
    refused, and otherwise the errors in `miles_router.client.errors`.
    """

    def __init__(self, transport: Transport, model_id: str | None = None) -> None:
        self._admin = transport
        self._model_id = model_id

    def of_model(self, model_id: str) -> FleetControl:
        """Return the same control for the workers of one model, for a router with several."""
        return FleetControl(self._admin, model_id)

    def _control_request(self, path: str, fields: Mapping[str, Any], *, repeatable: bool = False) -> Request:
        target = path if self._model_id is None else f"{path}?{urlencode({'model_id': self._model_id})}"
        return _post(target, fields, repeatable=repeatable)

    async def control(self, path: str, **fields: Any) -> Any:
        """Send a `POST` to a control endpoint, for example `control("/load_lora_adapter", lora_name="a",
        lora_path="/a")`. Return the JSON of the reply, or its text if it is not JSON. A field that is None is left
        out."""
        raw = await self._admin.bytes(self._control_request(path, fields))
        try:
            return orjson.loads(raw) if raw else None
        except orjson.JSONDecodeError:
            return raw.decode("utf-8", "replace")

    # Around a weight update

    @asynccontextmanager
    async def paused(self, mode: PauseMode = "retract") -> AsyncIterator[None]:
        """Pause the fleet within the block, and continue it afterwards in any case, cancellation included.

            async with client.paused():
                ...                                     # the new weights
                await client.update_weight_version("7")
                await client.flush_cache()

        Raises:
            FanOutFailed: a worker could not be paused, and the fleet goes on as before; or a worker could not be
                continued.
        """
        try:
            await self.pause(mode)
        except BaseException as error:
            if not _nothing_is_paused(error):
                await _finish(self.continue_())
            raise
        try:
            yield
        finally:
            await _finish(self.continue_())

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Stop generating until `continue_()`; prefer `paused()`, which cannot forget it. Unlike in SGLang, the default
        aborts nothing: running generations are queued again, and go on after the pause."""
        await self._admin.bytes(self._control_request("/pause_generation", {"mode": mode}, repeatable=True))

    async def continue_(self) -> None:
        """Generate again; harmless if nothing is paused."""
        await self._admin.bytes(self._control_request("/continue_generation", {}, repeatable=True))

    async def update_weights_from_disk(
        self, model_path: str, *, weight_version: str | None = None, flush_cache: bool | None = None, **fields: Any
    ) -> None:
        """Load `model_path` on every worker, as version `weight_version`. Further fields are SGLang's."""
        fields = {"weight_version": weight_version, "flush_cache": flush_cache, **fields}
        await self.control("/update_weights_from_disk", model_path=model_path, **fields)

    async def update_weight_version(self, version: str, *, abort_all_requests: bool = False) -> None:
        """Set the name of the weights that every worker has now. Unlike in SGLang, the default aborts no waiting
        requests."""
        await self.control("/update_weight_version", new_version=version, abort_all_requests=abort_all_requests)

    async def flush_cache(self) -> None:
        """Empty the prefix caches, after new weights. Refused with 400 while a worker holds generations in place."""
        await self.control("/flush_cache")

    async def release_memory(self, tags: Sequence[str] | None = None) -> None:
        """Put the fleet to sleep: release its memory, or only the parts named by `tags` (`weights`, `kv_cache`,
        `cuda_graph`). Generations wait until `resume_memory()`."""
        await self.control("/release_memory_occupation", tags=tags)

    async def resume_memory(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory again, or only the parts named by `tags`; with the last of them the fleet is awake."""
        await self.control("/resume_memory_occupation", tags=tags)

    # Generations under way

    async def abort(self, rid: str) -> None:
        """Abort generations whose id is `rid` or begins with it; they return with the output so far."""
        await self._admin.bytes(self._control_request("/abort_request", {"rid": rid}, repeatable=True))

    async def abort_group(self, group: str | int) -> None:
        """Abort the sessions and generations of a group (`X-Group-Id`)."""
        await self._admin.bytes(_post("/abort_request", {"group": group}, repeatable=True))

    async def abort_all(self) -> None:
        """Abort every running generation."""
        await self.control("/abort_request", abort_all=True)

    # Workers

    async def workers(self) -> list[WorkerInfo]:
        """Return every registered worker."""
        return await self._admin.get_list("/workers", "workers")

    async def add_worker(self, url: str, *, api_key: str | None = None, **attributes: Any) -> WorkerInfo:
        """Register a worker; harmless when repeated. Attributes, for example `labels`, are shown by the router;
        `model_id` decides which requests the worker gets."""
        body = {"url": url, "api_key": api_key, "model_id": self._model_id, **attributes}
        worker: WorkerInfo = await self._admin.json(_post("/workers", body, repeatable=True))
        return worker

    async def remove_worker(self, worker: str, *, drain: bool = False) -> None:
        """Remove a worker by its URL or id. With `drain`, wait until its last request has ended.

        Raises:
            NotFound: no such worker is registered.
        """
        if "://" in worker:
            await self.control("/remove_worker", url=worker, drain=drain)
        else:
            path = f"/workers/{quote(worker, safe='')}"
            await self._admin.bytes(Request("DELETE", f"{path}?drain=true" if drain else path))

    async def info(self) -> dict[str, Any]:
        """Return `/router/info`: version, fleet, gate, middlewares, statistics, settings."""
        info: dict[str, Any] = await self._admin.json(Request("GET", "/router/info", repeatable=True))
        return info


def _post(path: str, fields: Mapping[str, Any], *, repeatable: bool = False) -> Request:
    body = {name: value for name, value in fields.items() if value is not None}
    return Request("POST", path, body, repeatable=repeatable)


def _nothing_is_paused(error: BaseException) -> bool:
    """Return whether a failed pause is known to have left the fleet as it was."""
    refused = isinstance(error, ErrorReply) and 400 <= error.status < 500
    return refused or isinstance(error, (FanOutFailed, NotConnected))


async def _finish(work: Coroutine[Any, Any, None]) -> None:
    """Await `work` to its end; a cancellation is raised after that."""
    task = asyncio.ensure_future(work)
    cancellation: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancellation = error
    task.result()
    if cancellation is not None:
        raise cancellation
