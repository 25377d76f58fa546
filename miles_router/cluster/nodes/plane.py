"""The control plane of several machines: the same one, reached by TCP, which leases slots to processes.

It cannot end a process on another machine. Instead it waits until the leases of one that does not follow have run out:
without them that one sends no generation. Whether it is still the only control plane it finds out in the state
directory, where a younger one has taken its slot over; it does so before it prolongs anything, and before it tells
engines anything. At the write itself it asks the clock: it may have stood still in between.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from miles_router import tasks
from miles_router.cluster.control.channel import Handler, Message
from miles_router.cluster.control.followers import Followers
from miles_router.cluster.control.plane import ControlDuty
from miles_router.cluster.nodes.leases import EPOCHS, Authority, Seat, Term
from miles_router.cluster.nodes.machines import Machines, clock
from miles_router.cluster.nodes.proof import ACCEPTS, CONNECTS, prove
from miles_router.control.fan_out import FanOut
from miles_router.engines.known import may_come_twice
from miles_router.errors import StateError, StateOutdated, UpstreamError
from miles_router.fleet.workers import Worker
from miles_router.forwarding.outgoing import Outgoing, send
from miles_router.forwarding.reply import Reply
from miles_router.forwarding.upstream import NotAdmitted, Upstream
from miles_router.pools.pools import Pools
from miles_router.slots import CONTROL

logger = logging.getLogger(__name__)

#: The section of what is decided that says where slots are.
NODES = "nodes"
#: Seconds between two looks whether a lease has run out.
LOOK = 0.05


class DistantFollowers(Followers):
    """Processes on other machines. Who has leases sends requests."""

    def __init__(self, write: Callable[[], dict[str, Any]], machines: Machines) -> None:
        super().__init__(self._leased, write, patience=machines.lease)
        self.authority: Authority | None = None

    def _leased(self) -> list[int]:
        """The numbers of the processes that have leases."""
        return [] if self.authority is None else [each.number for each in self.authority.alive(clock())]

    async def _end(self, process: int) -> None:
        """Prolong nothing of one, and return when its leases have run out."""
        if self.authority is not None and process in self.senders:
            logger.error("process_does_not_follow", extra={"fields": {"process": process}})
            self.authority.revoke(process)
        if process in self._followers:
            self._followers[process].channel.close()
        while process in self.senders:  # noqa: ASYNC110  # time is what has to pass
            await asyncio.sleep(LOOK)


class LeadersFanOut(FanOut):
    """Tells engines nothing unless this control plane alone decides.

    Args:
        confirmed: makes sure of that.
        is_certain: whether it has been so since, asked at each write.
    """

    def __init__(
        self, upstream: Upstream, confirmed: Callable[[], Awaitable[bool]], is_certain: Callable[[], bool]
    ) -> None:
        super().__init__(upstream)
        self._confirmed = confirmed
        self._is_certain = is_certain

    def reading(self) -> FanOut:
        """See `FanOut`: whoever decides, engines may be asked."""
        return FanOut(self._upstream)

    async def _send(self, worker: Worker, request: Outgoing) -> Reply:
        while await self._confirmed():
            with suppress(NotAdmitted):
                return await send(
                    self._upstream,
                    worker,
                    request,
                    slot=False,
                    admit=self._is_certain,
                    fresh=not may_come_twice(request.method, request.target),
                )
        raise UpstreamError("nothing was sent: another control plane may decide by now")


class MachinesDuty(ControlDuty):
    """The control plane of several machines.

    Args:
        listener: where it listens.
        ready: hears its address once it leases.
        ended: is called when another control plane has begun.
    """

    shares_state = True

    def __init__(self, directory: Path, machines: Machines, listener: socket.socket, ended: Callable[[], None]) -> None:
        self._machines = machines
        super().__init__(directory)
        self._listener = listener
        self._ended = ended
        self._authority: Authority
        self._term = Term(machines.lease)
        #: Where machines are reached, by their lives.
        self._urls: dict[str, str] = {}
        #: By which requests between machines are known to be new. It goes on under the next control plane.
        self._beats = 0

    def _followers(self, directory: Path) -> DistantFollowers:
        return DistantFollowers(self._written, self._machines)

    async def _listen(self) -> asyncio.AbstractServer:
        """Listens once it is the only one that may lease."""
        store = self._registrations.store
        assert store is not None
        term = await store.claim(CONTROL)
        self._beats = (term - 1) * EPOCHS  # none that any before it has had, also where nobody is left who knows them
        machines = self._machines
        self._authority = Authority(
            nodes=machines.count,
            processes=machines.processes,
            seconds=machines.lease,
            term=term,
            now=clock(),
            first=term == 1,
        )
        assert isinstance(self.followers, DistantFollowers)
        self.followers.authority = self._authority
        return await asyncio.start_server(self._admit, sock=self._listener)

    async def _gather(self) -> None:
        """Whoever acts by what another control plane has decided has been here by then, or acts no more."""
        await asyncio.sleep(max(0.0, self._authority.opens - clock()))
        await super()._gather()

    async def _begin(self, state: tuple[int, dict[str, Any]]) -> None:
        if NODES in state[1]:
            self._beats = state[1][NODES]["beat"] + 1
        await super()._begin(state)

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await prove(reader, writer, self._machines.secret, side=ACCEPTS, other=CONNECTS)
        except OSError as error:
            logger.warning("stranger_refused", extra={"fields": {"reason": str(error)}})
            writer.close()
            return
        await self._welcome(reader, writer)

    def _shards(self) -> int:
        return self._machines.count * self._machines.processes

    def fan_out(self, upstream: Upstream) -> FanOut:
        """See `Duty`."""
        return LeadersFanOut(upstream, self._confirmed, lambda: self._term.is_certain(clock()))

    def _handlers(self) -> dict[str, Handler]:
        return {**super()._handlers(), "lease": self._lease, "leave": self._leave, "ping": self._ping}

    def _written(self) -> dict[str, Any]:
        sections = super()._written()
        seats = [each.seat for each in self._authority.alive(clock())]
        self._urls = {seat.life: self._urls[seat.life] for seat in seats}
        places = {str(seat.node): self._urls[seat.life] for seat in seats}  # who came last counts
        owners = sorted([slot, node] for slot, node in self._authority.owners().items())
        sections[NODES] = {"places": places, "slots": owners, "beat": self._beats}
        return sections

    async def _lease(self, message: Message) -> Message:
        """Prolong the leases of a process. The order matters: see `leases`."""
        fields, now = message.fields, clock()
        seat, number = Seat(*fields["seat"]), fields["process"]
        before = self._authority.until(number, now)
        grant = self._authority.renew(seat, number, dict(fields["claimed"]), now)
        self._urls[seat.life] = fields["url"]
        until = self._authority.until(number, now)
        try:
            confirmed = await self._confirmed()
        except asyncio.CancelledError:  # it has gone, and nobody hears the answer
            self._authority.withdraw(number, until, before)
            raise
        if not confirmed:
            return Message({"answered": False})
        if grant is None:
            return Message({"answered": True, "grant": None})
        return Message({"answered": True, "grant": [[*map(list, grant.slots.items())], grant.seconds, grant.surplus]})

    async def _confirmed(self) -> bool:
        """Whether it still decides. Once another one does, it ends."""
        store, began = self._registrations.store, clock()
        assert store is not None
        try:
            await store.append("lease", {1: secrets.token_bytes(8)}, slot=CONTROL)
        except StateOutdated:
            logger.warning("control_plane_succeeded")
            self._ended()
            return False
        except StateError as error:
            logger.error("lease_not_prolonged", extra={"fields": {"reason": str(error)}})
            return False
        self._term.confirmed(began)
        return True

    @asynccontextmanager
    async def running(self, pools: Pools) -> AsyncIterator[None]:
        """See `Duty`. When all have gone over to another one, nobody asks this one for leases any more: it looks.
        And it beats, which each follows: who does not has lost its leases."""
        async with super().running(pools):
            looking = tasks.spawn(self._look(), name="whether another one decides")
            try:
                yield
            finally:
                await tasks.cancelled(looking)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(self._machines.lease / 2)
            self._beats += 1
            await self._confirmed()

    async def _ping(self, message: Message) -> None:
        """Being here is the answer."""

    async def _leave(self, message: Message) -> None:
        """A process has done all it had to do."""
        if message.fields["gives_back"]:
            self._authority.give_back(message.fields["process"], clock())
        else:
            self._authority.end(message.fields["process"])


def end_process() -> None:
    """End this process in order."""
    os.kill(os.getpid(), signal.SIGTERM)
