"""Registration and removal of workers: by request (`POST /add_worker`, `POST /workers`) and by discovery."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

import orjson

from miles_router.errors import BadRequest, NotFound
from miles_router.fleet.worker_url import WorkerUrl, parse_worker_url
from miles_router.fleet.workers import BOOTSTRAP_PORT, DISCOVERED, ROLE, Role, Worker
from miles_router.pools.pools import ModelPool, Pools
from miles_router.pools.registrations import Registrations
from miles_router.settings.config import model_id_problem

#: Fields of `POST /workers` besides the URL, the key and the fields of a prefill/decode half. Answers show all of them.
ATTRIBUTES = ("model_id", "labels", "priority", "cost")
MAX_PORT = 65535
MAX_ATTRIBUTES_BYTES = 4096


class WorkerRegistry:
    """Adds workers to the pools and removes them, in memory and in the state directory together."""

    def __init__(self, pools: Pools, registrations: Registrations) -> None:
        self._pools = pools
        self._registrations = registrations
        self._changing = WeakValueDictionary[str, asyncio.Lock]()

    async def add(self, arguments: Mapping[str, Any], *, source: str | None = None) -> Worker:
        """Register a worker, or change a registered one, and return it.

        Args:
            arguments: `url`, and optionally `api_key`, `model_id` and other attributes, not yet checked.
            source: the discovery source that lists the worker. It becomes routable when it has answered a check and
                its weights are the fleet's. A worker that registered itself is returned as it is.

        Raises:
            BadRequest: an argument is invalid, or the worker is registered for another model.
            PartlyFailed, UpstreamUnreachable: see `Fleet.join`.
            StateError: the registration cannot be made durable.
        """
        address = url_of(arguments)
        api_key = arguments.get("api_key")
        if api_key is not None and (not isinstance(api_key, str) or not api_key.isascii() or not api_key.isprintable()):
            raise BadRequest("api_key must be a string of printable ASCII")
        attributes = {name: arguments[name] for name in ATTRIBUTES if name in arguments} | _half(arguments)
        if len(orjson.dumps(attributes)) > MAX_ATTRIBUTES_BYTES:
            raise BadRequest(f"a worker's attributes may take at most {MAX_ATTRIBUTES_BYTES} bytes of JSON")
        async with self._one_by_one(address.url):
            pool, known = await self._pool_of(address, arguments.get("model_id"))
            if source is not None and known is not None and DISCOVERED not in known.attributes:
                return known
            if known is not None and not attributes:  # without new attributes, a known worker keeps its old ones
                attributes = {name: each for name, each in known.attributes.items() if name != DISCOVERED}
            elif pool.name:
                attributes["model_id"] = pool.name
            if source is None:  # the worker is its own from now on, even if discovery had added it
                worker = await pool.fleet.join(address, api_key=api_key or None, attributes=attributes)
            else:
                attributes[DISCOVERED] = source
                worker = pool.fleet.pool.add_unreached(address, api_key=api_key or None, attributes=attributes)
            await self._registrations.hold(worker, pool.name)
        return worker

    async def remove(self, url: str, *, drain: bool) -> None:
        """Remove a worker. With `drain`, return when its last request has ended or it was registered again.

        Raises:
            NotFound: the worker is not registered.
            StateError: the removal cannot be made durable.
        """
        gone = asyncio.Event()
        async with self._one_by_one(url):
            pool, worker = self._pools.find_worker(url)
            await self._registrations.drop(worker)
            if drain:
                pool.fleet.pool.drain(worker, gone.set)
            else:
                pool.fleet.pool.remove(worker)
                gone.set()
        await gone.wait()

    def _one_by_one(self, url: str) -> asyncio.Lock:
        """Return the lock for changes to one worker: its registration in memory and on disk must change together."""
        lock = self._changing.get(url)
        if lock is None:
            lock = self._changing[url] = asyncio.Lock()
        return lock

    async def _pool_of(self, address: WorkerUrl, model_id: object) -> tuple[ModelPool, Worker | None]:
        """Return the pool for a worker, and the worker if it is already registered in it.

        Raises:
            BadRequest: the model id is invalid, or the worker is registered for another model.
        """
        if model_id is not None and (problem := model_id_problem(model_id)):
            raise BadRequest(f"model_id: {problem}")
        with suppress(NotFound):
            pool, worker = self._pools.find_worker(address.url)
            if model_id not in (None, pool.name):
                where = f"for the model {pool.name!r}" if pool.name else "without a model_id"
                raise BadRequest(f"{address.url} is registered {where}; remove it first")
            return pool, worker
        return await self._pools.open(None if model_id is None else str(model_id)), None


def url_of(arguments: Mapping[str, Any]) -> WorkerUrl:
    """Return the worker's address that the arguments of a request name. Raises BadRequest if there is none."""
    given = arguments.get("url", arguments.get("worker_url"))
    if given is None:
        raise BadRequest("url is required, as a query parameter or in a JSON body")
    return parse_worker_url(given)


def _half(arguments: Mapping[str, Any]) -> dict[str, object]:
    """Return a worker's role and a prefill worker's bootstrap port, if given. The port may be a string of digits.

    Raises:
        BadRequest: the role or port is invalid, or a prefill worker has no port.
    """
    role, port = arguments.get(ROLE), arguments.get(BOOTSTRAP_PORT)
    if role is not None and role not in list(Role):
        raise BadRequest(f"{ROLE} must be one of {', '.join(Role)}, got {role!r}")
    if isinstance(port, str) and port.isdecimal():
        port = int(port)
    if port is not None and (type(port) is not int or not 0 < port <= MAX_PORT):
        raise BadRequest(f"{BOOTSTRAP_PORT} must be a port, got {arguments[BOOTSTRAP_PORT]!r}")
    if role == Role.PREFILL and port is None:
        raise BadRequest(f"a prefill worker needs its {BOOTSTRAP_PORT} (--disaggregation-bootstrap-port)")
    given = {ROLE: role, BOOTSTRAP_PORT: port}
    return {name: value for name, value in given.items() if value is not None}
