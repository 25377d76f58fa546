"""The fleet, seen by a trainer: pause it, change its weights, continue it, look at its workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, TypedDict
from urllib.parse import quote, urlencode

import orjson

from miles_router.client.errors import ErrorReply, FanOutFailed, NotConnected
from miles_router.client.transport import Request, Transport

#: What happens to generations under way: they come back partial, are queued again, or stay where they are.
PauseMode = Literal["abort", "retract", "in_place"]


class WorkerInfo(TypedDict):
    """One worker as the router sees it; docs/http-api.md says what the fields mean."""

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
    """What needs the administration key. It has connections of its own: requests that wait for the fleet to continue
    cannot keep the one that continues it from being sent.

    Methods that ask every worker raise `FanOutFailed` where some worker did not do it, `ErrorReply` where all refused
    or the router did, and otherwise as the tree in `errors` says.
    """

    def __init__(self, transport: Transport, model_id: str | None = None) -> None:
        self._admin = transport
        self._model_id = model_id

    def of_model(self, model_id: str) -> FleetControl:
        """The same for the workers of one model, where the router has several."""
        return FleetControl(self._admin, model_id)

    def _order(self, path: str, fields: Mapping[str, Any], *, repeatable: bool = False) -> Request:
        asked = path if self._model_id is None else f"{path}?{urlencode({'model_id': self._model_id})}"
        return _post(asked, fields, repeatable=repeatable)

    async def control(self, path: str, **fields: Any) -> Any:
        """`POST` to a control endpoint, as `control("/load_lora_adapter", lora_name="a", lora_path="/a")`; the answer's
        JSON, or its text where it is not JSON. A field that is None is left out."""
        raw = await self._admin.bytes(self._order(path, fields))
        try:
            return orjson.loads(raw) if raw else None
        except orjson.JSONDecodeError:
            return raw.decode("utf-8", "replace")

    # Around a weight update

    @asynccontextmanager
    async def paused(self, mode: PauseMode = "retract") -> AsyncIterator[None]:
        """The fleet is paused within the block, and continues behind it whatever happens there, cancellation included.

            async with client.paused():
                ...                                     # the new weights
                await client.update_weight_version("7")
                await client.flush_cache()

        Raises:
            FanOutFailed: some worker could not be paused; the fleet goes on as before. Or one could not be continued.
        """
        try:
            await self.pause(mode)
        except BaseException as error:
            if not _nothing_is_paused(error):
                await _to_its_end(self.continue_())
            raise
        try:
            yield
        finally:
            await _to_its_end(self.continue_())

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Stop generating, until `continue_()`, which `paused()` cannot forget. Unlike SGLang's, the default cuts
        nothing: generations under way are queued again, and go on behind the pause."""
        await self._admin.bytes(self._order("/pause_generation", {"mode": mode}, repeatable=True))

    async def continue_(self) -> None:
        """Generate again; harmless where nothing is paused."""
        await self._admin.bytes(self._order("/continue_generation", {}, repeatable=True))

    async def update_weights_from_disk(
        self, model_path: str, *, weight_version: str | None = None, flush_cache: bool | None = None, **fields: Any
    ) -> None:
        """Every worker loads `model_path` and calls it `weight_version`. Further fields are SGLang's."""
        fields = {"weight_version": weight_version, "flush_cache": flush_cache, **fields}
        await self.control("/update_weights_from_disk", model_path=model_path, **fields)

    async def update_weight_version(self, version: str, *, abort_all_requests: bool = False) -> None:
        """Name the weights that every worker has now. Unlike SGLang's, the default aborts nothing that waits."""
        await self.control("/update_weight_version", new_version=version, abort_all_requests=abort_all_requests)

    async def flush_cache(self) -> None:
        """Forget every prefix, after new weights. Refused with 400 while a worker holds generations in place."""
        await self.control("/flush_cache")

    async def release_memory(self, tags: Sequence[str] | None = None) -> None:
        """Put the fleet to sleep: give back its memory, or the parts named by `tags` (`weights`, `kv_cache`,
        `cuda_graph`). Generations wait until `resume_memory()`."""
        await self.control("/release_memory_occupation", tags=tags)

    async def resume_memory(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again, or the parts named by `tags`; with the last of them the fleet is awake."""
        await self.control("/resume_memory_occupation", tags=tags)

    # Generations under way

    async def abort(self, rid: str) -> None:
        """End generations whose id is `rid` or begins with it; they come back with what they have."""
        await self._admin.bytes(self._order("/abort_request", {"rid": rid}, repeatable=True))

    async def abort_group(self, group: str | int) -> None:
        """End the work of a group: its sessions, and the generations of its `X-Group-Id`."""
        await self._admin.bytes(_post("/abort_request", {"group": group}, repeatable=True))

    async def abort_all(self) -> None:
        """End every generation under way."""
        await self.control("/abort_request", abort_all=True)

    # Workers

    async def workers(self) -> list[WorkerInfo]:
        """Every registered worker."""
        return await self._admin.listed("/workers", "workers")

    async def add_worker(self, url: str, *, api_key: str | None = None, **attributes: Any) -> WorkerInfo:
        """Register a worker; harmless when repeated. Attributes, `labels` for example, are shown; its `model_id` says
        which requests it gets."""
        body = {"url": url, "api_key": api_key, "model_id": self._model_id, **attributes}
        worker: WorkerInfo = await self._admin.json(_post("/workers", body, repeatable=True))
        return worker

    async def remove_worker(self, worker: str, *, drain: bool = False) -> None:
        """Remove a worker by its URL or id; with `drain` after its last request, until which this waits.

        Raises:
            NotFound: no such worker is registered.
        """
        if "://" in worker:
            await self.control("/remove_worker", url=worker, drain=drain)
        else:
            path = f"/workers/{quote(worker, safe='')}"
            await self._admin.bytes(Request("DELETE", f"{path}?drain=true" if drain else path))

    async def info(self) -> dict[str, Any]:
        """`/router/info`: version, fleet, gate, middlewares, statistics, settings."""
        info: dict[str, Any] = await self._admin.json(Request("GET", "/router/info", repeatable=True))
        return info


def _post(path: str, fields: Mapping[str, Any], *, repeatable: bool = False) -> Request:
    body = {name: value for name, value in fields.items() if value is not None}
    return Request("POST", path, body, repeatable=repeatable)


def _nothing_is_paused(error: BaseException) -> bool:
    """Whether a pause that failed is known to have left the fleet as it was."""
    refused = isinstance(error, ErrorReply) and 400 <= error.status < 500
    return refused or isinstance(error, (FanOutFailed, NotConnected))


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Await `work`; a cancellation is put off until it has ended."""
    task = asyncio.ensure_future(work)
    put_off: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            put_off = error
    task.result()
    if put_off is not None:
        raise put_off
