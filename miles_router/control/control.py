"""Control of the fleet: a request to all workers, and what its action means for the fleet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from miles_router.control.call import BRIEF, Call
from miles_router.control.effects import effect_of
from miles_router.control.engine_metrics import engine_metrics
from miles_router.control.fan_out import FanOut, FleetAnswer, one_answer, outgoing_order
from miles_router.control.health import HealthMonitor
from miles_router.control.requests import Requests
from miles_router.engines.actions import Abort, Action, ChangeAdapter, Continue, NameVersion, Pause
from miles_router.engines.client_json import read_json
from miles_router.engines.control import BadArguments, ControlRequest
from miles_router.engines.known import CONTROL, USUAL, ReadOrder, own_request
from miles_router.errors import BadRequest, StateError
from miles_router.fleet.fleet import Fleet
from miles_router.fleet.workers import Worker
from miles_router.forwarding.outgoing import Outgoing

logger = logging.getLogger(__name__)

#: Characters of an adapter's name that is remembered.
MAX_ADAPTER_NAME = 512


class Control:
    """Runs control requests: one after the other, but for those that may run beside others."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        fan_out: FanOut,
        requests: Requests,
        health: HealthMonitor,
        extra: Iterable[str] = (),
        read_timeout: float = BRIEF,
    ) -> None:
        #: Every control request by its path: those of the user's own, and those of engines.
        self.by_path: dict[str, ControlRequest] = {**{path: own_request(path) for path in extra}, **CONTROL}
        #: Layers that end what they know of a group when it is aborted.
        self.group_listeners = requests.group_listeners
        self.requests = requests
        #: Runs control requests where another process decides, and what that says of `may_silence`.
        self.relay: Callable[[str, Outgoing, str], Awaitable[FleetAnswer]] | None = None
        self.told_may_silence = False
        #: How many control requests there were: what engines have may be other than before.
        self.sent = 0
        self._fleet = fleet
        self._fan_out = fan_out
        self._health = health
        self._read_timeout = read_timeout
        self._one_at_a_time = asyncio.Lock()
        self._pausing = False  # the workers are being told to pause, and were neither paused nor asleep before

    @property
    def may_silence(self) -> bool:
        """Whether engines may be silent for what they are told, or were told: a pause may hold an update behind the
        router. While they are only being told to pause, they answer; one that hangs then would fail every pause."""
        if self.relay is not None:
            return self.told_may_silence
        return not self._pausing and (self._one_at_a_time.locked() or self._fleet.gate.deliberate)

    async def send(self, path: str, request: Outgoing, request_id: str) -> FleetAnswer:
        """One control request to every worker that it concerns.

        Raises:
            BadRequest: input that no worker could make sense of; none was asked.
            NoWorkerAvailable: no worker is registered.
            UnsupportedByEngine: the engine of one cannot do it; none was asked.
            StateError: that the fleet stands still cannot be made durable; none was asked.
            ControlUnavailable: another process decides, and is away or was lost meanwhile.
        """
        if self.relay is not None:
            return await self.relay(path, request, request_id)
        known = self.by_path[path]
        try:
            order = ReadOrder.read(known, request.target, _object(request.body))
        except BadArguments as problem:
            raise BadRequest(str(problem)) from None
        action, effect = order.action, effect_of(order.action)
        call = Call(
            request=request,
            order=order,
            timeout=known.timeout,
            fleet=self._fleet,
            fan_out=self._fan_out,
            requests=self.requests,
            health=self._health,
        )
        async with (
            nullcontext() if effect.beside_others else self._one_at_a_time,
            self._fleet.membership if effect.holds_membership else nullcontext(),
        ):
            await call.check()
            with self._noting_a_pause() if isinstance(action, Pause) else nullcontext():
                try:
                    outcomes = await effect.run(call)
                finally:
                    if effect.holds_membership:
                        await self.keep()
        self.sent += 1
        answer = one_answer(outcomes, request_id)
        adapter = action.name if isinstance(action, ChangeAdapter) else None
        if adapter is not None and len(adapter) <= MAX_ADAPTER_NAME and any(outcome.ok for outcome in outcomes):
            self._fleet.note_adapters([adapter])
        return answer

    async def keep(self) -> None:
        """Make durable whether the fleet stands still. Where that fails, the next router may wait for a continue."""
        try:
            await self._fleet.keep()
        except StateError as error:
            logger.warning("standstill_not_kept", extra={"fields": {"reason": str(error)}})

    @contextmanager
    def _noting_a_pause(self) -> Iterator[None]:
        self._pausing = not self._fleet.gate.deliberate
        try:
            yield
        finally:
            self._pausing = False

    async def pause(self, mode: str, request_id: str) -> FleetAnswer:
        """Pause the fleet: "abort", "retract" or "in_place". Raises as `send`; so with the others."""
        return await self._do(Pause(mode), request_id)

    async def go_on(self, request_id: str) -> FleetAnswer:
        """End the fleet's pause."""
        return await self._do(Continue(), request_id)

    async def abort(self, rid: str, request_id: str) -> FleetAnswer:
        """Abort a generation, by the name that its client knows."""
        return await self._do(Abort(rid), request_id)

    async def name_version(self, version: str, request_id: str) -> FleetAnswer:
        """Name the weights that the fleet has."""
        return await self._do(NameVersion(version), request_id)

    async def _do(self, action: Action, request_id: str) -> FleetAnswer:
        order = USUAL.order(action)  # as a client spells it
        return await self.send(order.target.partition(b"?")[0].decode(), outgoing_order(order), request_id)

    async def engine_metrics(self, workers: Iterable[Worker]) -> str:
        """What these engines say about themselves, as Prometheus reads it. Raises as `engine_metrics`."""
        return await engine_metrics(workers, self._fan_out.reading(), self._read_timeout)


def _object(body: bytes) -> Mapping[str, Any]:
    """The JSON object in a body; an empty one where there is none.

    Raises:
        BadRequest: it is something else.
    """
    if not body.strip():
        return {}
    arguments = read_json(body)
    if not isinstance(arguments, dict):
        raise BadRequest("the request body must be a JSON object")
    return arguments
