"""The entry of control requests: parse one, check it, send it to the workers, and update the fleet's state."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from miles_router.control.call import BRIEF, Call
from miles_router.control.effects import effect_of
from miles_router.control.engine_metrics import engine_metrics
from miles_router.control.fan_out import FanOut, FleetAnswer, merge_outcomes, outgoing_order
from miles_router.control.health import HealthMonitor
from miles_router.control.requests import OwnRequests, Requests
from miles_router.engines.actions import Abort, Action, Continue, NameVersion, Pause
from miles_router.engines.control import BadArguments, ControlRequest
from miles_router.engines.json_bytes import read_json
from miles_router.engines.known import CONTROL, USUAL, ReadOrder, own_request
from miles_router.errors import BadRequest, StateError
from miles_router.fleet.fleet import Fleet
from miles_router.fleet.workers import Worker
from miles_router.forwarding.forwarded import Outgoing

logger = logging.getLogger(__name__)


class Control:
    """The control requests of one fleet: it runs them one at a time, aborts in parallel with the others."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        fan_out: FanOut,
        requests: OwnRequests,
        health: HealthMonitor,
        extra: Iterable[str] = (),
        read_timeout: float = BRIEF,
    ) -> None:
        #: Every control request by its path: the paths of the setting `fan_out`, and the control paths of engines.
        self.by_path: dict[str, ControlRequest] = {**{path: own_request(path) for path in extra}, **CONTROL}
        #: Middleware callbacks that end their part of a group when it is aborted.
        self.group_listeners = requests.group_listeners
        #: The requests in flight; in the leader those of all shards.
        self.requests: Requests = requests
        #: In a shard: sends control requests to the leader, and the leader's value of `may_silence`.
        self.relay: Callable[[str, Outgoing, str], Awaitable[FleetAnswer]] | None = None
        self.leader_may_silence = False
        #: The number of control requests sent: after a change, cached knowledge of the engines may be outdated.
        self.sent = 0
        self._fleet = fleet
        self._fan_out = fan_out
        self._health = health
        self._read_timeout = read_timeout
        self._lock = asyncio.Lock()
        self._pausing = False  # a pause is being sent, and the fleet was neither paused nor asleep before

    @property
    def may_silence(self) -> bool:
        """Whether engines may be silent because of a control request: one is in progress, or the fleet is paused or
        asleep (a weight update may run then that bypasses the router). While a first pause is being sent, this is
        False: engines answer then, and excusing a hanging one would make every pause fail."""
        if self.relay is not None:
            return self.leader_may_silence
        return not self._pausing and (self._lock.locked() or self._fleet.gate.closed_by_router)

    async def send(self, path: str, request: Outgoing, request_id: str) -> FleetAnswer:
        """Send one control request to every worker that it concerns.

        Raises:
            BadRequest: the arguments are invalid; no worker was asked.
            NoWorkerAvailable: no worker is registered.
            UnsupportedByEngine: an engine does not support the action; no worker was asked.
            StateError: the pause or sleep could not be made durable; no worker was asked.
            Unavailable: this process is a shard, and its leader is not reachable or was lost meanwhile.
        """
        if self.relay is not None:
            return await self.relay(path, request, request_id)
        known = self.by_path[path]
        try:
            order = ReadOrder.read(known, request.target, _parse_object(request.body))
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
            nullcontext() if effect.concurrent else self._lock,
            self._fleet.join_lock if effect.blocks_joins else nullcontext(),
        ):
            await call.check()
            with self._mark_pausing() if isinstance(action, Pause) else nullcontext():
                try:
                    outcomes = await effect.run(call)
                finally:
                    if effect.blocks_joins:
                        await self.save_standstill()
        self.sent += 1
        return merge_outcomes(outcomes, request_id)

    async def save_standstill(self) -> None:
        """Make durable whether the fleet is paused or asleep. A failure is only logged: after a restart, the router may
        then wait for a continue that was already sent."""
        try:
            await self._fleet.save_standstill()
        except StateError as error:
            logger.warning("pause_state_not_saved", extra={"fields": {"reason": str(error)}})

    @contextmanager
    def _mark_pausing(self) -> Iterator[None]:
        self._pausing = not self._fleet.gate.closed_by_router
        try:
            yield
        finally:
            self._pausing = False

    async def pause(self, mode: str, request_id: str) -> FleetAnswer:
        """Pause the fleet in mode "abort", "retract" or "in_place". This and the following methods raise as `send`
        does."""
        return await self._send_action(Pause(mode), request_id)

    async def continue_generation(self, request_id: str) -> FleetAnswer:
        return await self._send_action(Continue(), request_id)

    async def abort(self, rid: str, request_id: str) -> FleetAnswer:
        """Abort a generation by the id that its client knows."""
        return await self._send_action(Abort(rid), request_id)

    async def name_version(self, version: str, request_id: str) -> FleetAnswer:
        """Set the name of the weight version that the workers have."""
        return await self._send_action(NameVersion(version), request_id)

    async def _send_action(self, action: Action, request_id: str) -> FleetAnswer:
        order = USUAL.order(action)  # in the form in which clients send it
        return await self.send(order.target.partition(b"?")[0].decode(), outgoing_order(order), request_id)

    async def engine_metrics(self, workers: Iterable[Worker]) -> str:
        """Return these workers' metrics as one Prometheus text. Raises as `engine_metrics` does."""
        return await engine_metrics(workers, self._fan_out.without_leadership(), self._read_timeout)


def _parse_object(body: bytes) -> Mapping[str, Any]:
    """Return the JSON object in a body; an empty one if the body is blank.

    Raises:
        BadRequest: the body is not a JSON object.
    """
    if not body.strip():
        return {}
    arguments = read_json(body)
    if not isinstance(arguments, dict):
        raise BadRequest("the request body must be a JSON object")
    return arguments
