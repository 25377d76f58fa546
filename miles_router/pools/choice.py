"""The choice of the pool that takes a request, by the model or the adapter that its body names."""

from __future__ import annotations

from miles_router.asgi.exchange import Exchange, Scope
from miles_router.asgi.wire import first_header
from miles_router.engines import models
from miles_router.engines.json_bytes import read_json
from miles_router.engines.known import USUAL
from miles_router.errors import BadRequest, UnknownModel
from miles_router.fleet.gate import computes, endpoint
from miles_router.fleet.placement.sessions import SESSION_PREFIX
from miles_router.pools.pools import SHOWN, SHOWN_ADAPTERS, ModelPool, Pools
from miles_router.settings.trained_models import mount_of

MULTIPART, AUTHORIZATION = b"multipart/", b"authorization"


class PoolChoice:
    """The choice among `pools`."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    async def choose(self, scope: Scope, exchange: Exchange, body: bytes) -> bytes:
        """Record the pool and the adapter of a request in its exchange. Return the body, with the model as engines read
        it.

        Raises:
            UnknownModel: the request names a model that no worker has, or no model where one is required.
            BadRequest: its model cannot be read, or it names two adapters.
            NoWorkerAvailable: it may name an adapter, and no worker reports which ones there are.
        """
        path = scope["path"]
        key, default = first_header(scope["headers"], AUTHORIZATION), self._pools.default
        within = bool(exchange.mount) or path.startswith(SESSION_PREFIX)
        pool = default if exchange.pool is None else self._pools.of_id(exchange.pool)
        model = self._model(scope, body, pool if within or not self._pools.named else None)
        if within:
            adapter = None if model is None else await self._within(pool, model, key)
        elif model is None:
            pool, adapter = self._pools.meant(models.MODEL if computes(path) else None), None
        elif self._pools.named:
            pool, adapter = await self._find(model)
        else:
            adapter = await self._adapter(pool, model, key)
        if pool is not default and not exchange.mount:
            exchange.pool = pool.name
            if pool.name in self._pools.trained:
                exchange.mount = mount_of(pool.name)
        if computes(path) and endpoint(path) not in USUAL.adapter_only_by_field:
            adapter = _with_own(endpoint(path), body, adapter)
        if adapter is None:
            if not self._pools.named and model not in default.names:
                exchange.routing.model = model
            return body
        exchange.adapter, spelled = adapter, pool.spelled(adapter)
        if spelled == model or (model and not self._pools.named and model.partition(":")[2].strip() == adapter):
            return body  # engines accept any base model name without a colon
        return models.with_model(body, spelled)

    def _model(self, scope: Scope, body: bytes, only: ModelPool | None) -> str | None:
        """Return the model that a body names. `only`: the pool that takes the request, whatever the body names."""
        headers = scope["headers"]
        kind = first_header(headers, b"content-type") or b""
        if body and (first_header(headers, b"content-encoding") is not None or kind.lower().startswith(MULTIPART)):
            if only is not None and only.fleet.applies_none:
                return None
            raise BadRequest("the model in this body cannot be read: send it as uncompressed JSON")
        model = models.model_of(body, read_json)
        if model is None:
            return None
        if not isinstance(model, str) or not models.is_encodable(model):
            raise BadRequest("model must be a string")
        return model

    async def _find(self, model: str) -> tuple[ModelPool, str | None]:
        pool = self._pools.find(model)
        if pool is not None:
            return pool, None
        if model == models.DEFAULT:
            return self._pools.meant(models.MODEL), None
        await self._learn()
        return self._by_names(model) or await self._by_adapter(model)

    async def _within(self, pool: ModelPool, model: str, key: bytes | None) -> str | None:
        """Return the adapter that `model` names, or None, in a request whose path names the pool or a session of it.

        Raises:
            BadRequest: it is the name of another pool's model, or of an adapter that only another pool has.
        """
        if not self._pools.named:
            return await self._adapter(pool, model, key)
        other = self._pools.find(model)
        if other is None:
            await self._learn()
            names = pool.names | {models.DEFAULT}
            own = model in names or models.adapter_of(model, names) is not None
            other = pool if own else (self._by_names(model) or (None, None))[0]
        if other is None or other is pool:
            adapter = await self._adapter(pool, model, key)
            if adapter is not None or other is pool:
                return adapter
            other = next((each for each in self._pools if each.fleet.adapter_of(model) is not None), None)
            if other is None:
                return None
        own_name = pool.name or models.DEFAULT
        raise BadRequest(f"the path is for the model {own_name!r}, and the request names {model[:SHOWN]!r}")

    async def _adapter(self, pool: ModelPool, model: str, key: bytes | None) -> str | None:
        """Return the adapter that `model` names, or None, in a request for this pool. It answers to any name, because
        agents send names of their own."""
        names = pool.names | {models.DEFAULT}
        if model in names:
            return None
        if (based := models.adapter_of(model, names)) is not None:
            return based[1]
        for name in models.possible_adapters(model):
            if await pool.has_had(name, key):
                return name
        return None

    async def _learn(self) -> None:
        """Learn every pool's names before a search: a name of two pools' models must be found in both."""
        for each in self._pools:
            await each.learn()

    def _by_names(self, model: str) -> tuple[ModelPool, str | None] | None:
        """Return the only pool whose model has this name, or is the base of the adapter in it; None if several
        match."""
        pools, default = [pool for pool in self._pools if pool.selectable], self._pools.default
        names = {pool: pool.names | ({models.DEFAULT} if pool is default else set()) for pool in pools}
        called = [pool for pool in pools if model in names[pool]]
        if called:
            return (called[0], None) if len(called) == 1 else None
        for own in ({pool.name} for pool in pools), names.values():  # a model_id takes precedence over engines' names
            based = [
                (pool, found)
                for pool, each in zip(pools, own, strict=True)
                if (found := models.adapter_of(model, each - {""}))
            ]
            if based:
                longest = max(len(base) for _, (base, _) in based)
                best = [(pool, adapter) for pool, (base, adapter) in based if len(base) == longest]
                return best[0] if len(best) == 1 else None
        return None

    async def _by_adapter(self, model: str) -> tuple[ModelPool, str | None]:
        """Return the only pool that has an adapter of this name. The client's key is not sent to these workers, since
        the request may be for another pool.

        Raises:
            UnknownModel: no pool has it, or several do.
            NoWorkerAvailable: a worker has not reported its adapters.
        """
        adapters = {pool: await pool.adapters() for pool in self._pools if pool.selectable}
        having = [pool for pool, each in adapters.items() if model in each]
        if len(having) < 2:
            for pool in adapters:
                pool.see_told()  # a worker with an unknown list may have it too
        if len(having) == 1:
            return having[0], model
        named = sorted((pool.name, adapter) for pool, each in adapters.items() for adapter in each)[:SHOWN_ADAPTERS]
        pools = {pool.name: pool for pool in adapters}
        written = sorted(pools[name].spelled(adapter) for name, adapter in named)
        more = f"; adapters: {', '.join(written)}" if written else ""
        raise UnknownModel(f"the model {model[:SHOWN]!r} does not exist; {self._pools.known()}{more}", models.MODEL)


def _with_own(path: str, body: bytes, adapter: str | None) -> str | None:
    """Return the adapter of a request for a path that takes a single one; `adapter` is the one that its model names.

    Raises:
        BadRequest: the adapter field names several, or another than the model does.
    """
    own = models.own_adapters(body, read_json)
    if own is None or (adapter is None and path in USUAL.adapter_by_field):  # the engine reads the field itself
        return adapter
    if not isinstance(own, str) or not models.is_encodable(own):
        raise BadRequest(f"{models.ADAPTER} must be a string")
    if adapter not in (None, own):
        raise BadRequest(
            f"{models.MODEL} and {models.ADAPTER} name two adapters, {adapter[:SHOWN]!r} and {own[:SHOWN]!r}"
        )
    return own
