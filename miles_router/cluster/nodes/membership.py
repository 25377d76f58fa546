"""What a process may act for, as long as it hears from the control plane; and where everything else is."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from miles_router import tasks
from miles_router.admin.routes import Admin
from miles_router.cluster.control.channel import Channel, ChannelLost, Message
from miles_router.cluster.control.data import Link
from miles_router.cluster.nodes.leases import Grant, Seat, Tenancy
from miles_router.cluster.nodes.machines import Machine, clock
from miles_router.cluster.nodes.plane import NODES
from miles_router.cluster.nodes.proof import ACCEPTS, CONNECTS, prove
from miles_router.errors import NodeUnleased, StateError, StateOutdated
from miles_router.pools.pools import Pools
from miles_router.slots import slot_of
from miles_router.state.store import StateStore

logger = logging.getLogger(__name__)

#: Of a process's number the lower bits are by chance; above them is how often one was started in its place.
CHANCE = 48
#: How often a lease is asked for within its time, and how many seconds lie between two tries where nobody answers.
RENEWALS, AGAIN = 5, 0.1
#: The part of a lease's time for which a control plane may be silent before it is left, and for which one that is being
#: connected to may take.
SILENT = 0.5


class Membership(Link):
    """One process's connection to the control plane of its machines, and its leases.

    Args:
        seat: where it stands.
        generation: of this process; those that were started before it in its seat have smaller ones.
        fenced: is called when it has lost what it had: whatever it knows may be no longer true.
        surplus: is called when another machine is to have a part of what it has.
    """

    def __init__(
        self,
        node: Machine,
        seat: Seat,
        *,
        generation: int,
        fenced: Callable[[], None],
        surplus: Callable[[], None],
    ) -> None:
        super().__init__(Path(), lambda: None, 0, seat.node * node.machines.processes + seat.process)
        self.process = generation << CHANCE | secrets.randbits(CHANCE)
        #: Those that it may open in the store, and those that it has claimed there.
        self.claimable: set[int] = set()
        self.slots: set[int] = set()
        self.node = node
        self.store: StateStore | None = None
        self._numbers = itertools.count(1 + secrets.randbits(62))
        self._seat = seat
        self._fenced = fenced
        self._surplus = surplus
        self._tenancy = Tenancy()
        self._leased = asyncio.Event()
        self._renewing: asyncio.Task[None] | None = None
        self._claiming: asyncio.Task[None] | None = None
        self._over = self._gives_back = False
        self._nodes: Mapping[int, int] = {}
        #: Where other machines that are there are reached; and who hears of one that is there no more.
        self.urls: Mapping[int, str] = {}
        self.lost: Callable[[str], None] = lambda url: None

    # What may be done

    @property
    def is_fresh(self) -> bool:
        """Whether this process may send generations, and act for what it has."""
        return not self._over and self._tenancy.is_fresh(clock())

    def check(self) -> None:
        """Raises:
        NodeUnleased: this process may not act now.
        """
        if not self.is_fresh:
            raise NodeUnleased("this machine has not heard from the control plane for too long to act; ask again")

    def has(self, name: str) -> bool:
        """Whether this process may act for what is named so."""
        return slot_of(name) in self.slots and self.is_fresh

    def node_of(self, name: str) -> int | None:
        """The other machine that has what is named so; None where it is this one, or nobody."""
        node = self._nodes.get(slot_of(name))
        return None if node == self.node.index else node

    def url_of(self, node: int) -> str | None:
        """Where another machine is reached; None where it is not there."""
        return self.urls.get(node)

    # Renewing

    async def begin(self) -> None:
        """Ask for leases from now on: all that takes long before the first request has been done. Returns with the
        first answer, or when that takes too long."""
        self._renewing = tasks.spawn(self._renew_always(), name="leases")
        with suppress(TimeoutError):
            await tasks.within(self.node.machines.lease, self._leased.wait(), name="wait for a lease")

    async def _renew_always(self) -> None:
        seconds = self.node.machines.lease
        while not self._over:
            wait = seconds / RENEWALS
            channel = self._channel
            if channel is None or channel.lost:
                wait = AGAIN
            else:
                with suppress(ChannelLost, TimeoutError):
                    await tasks.within(seconds / 2, self._renew(channel), name="lease")
            await asyncio.sleep(min(wait, seconds / RENEWALS))

    async def _renew(self, channel: Channel) -> None:
        sent = clock()
        claimed = [*map(list, self._tenancy.claimed(sent).items())]
        answer = await channel.ask(
            "lease", process=self.process, seat=list(self._seat), claimed=claimed, url=self.node.url
        )
        if not answer.fields["answered"]:
            return
        granted = answer.fields["grant"]
        grant = None if granted is None else Grant(dict(granted[0]), granted[1], granted[2])
        if self.store is not None and self.store.refused[StateOutdated.type]:
            grant = None  # somebody who was given no lease has taken something over
        if not self._tenancy.renewed(grant, sent):
            self._end("it has lost what it had")
            return
        self._leased.set()
        if self._followed.is_set():
            for pool in self._pools:
                pool.fleet.gate.update()  # it may be open again
        if self._claiming is None and self._tenancy.slots.keys() != self.slots:
            self._claiming = tasks.spawn(self._claim(dict(self._tenancy.slots)), name="claim slots")
        if grant is not None and grant.surplus and not self._gives_back:
            self._gives_back = True
            logger.info("node_gives_back")
            self._surplus()

    async def _claim(self, slots: Mapping[int, int]) -> None:
        """Take slots over in the store: nobody with an older lease commits anything to them from then on."""
        try:
            await asyncio.gather(*(self._claim_one(slot, epoch) for slot, epoch in slots.items()))
        finally:
            self._claiming = None

    async def _claim_one(self, slot: int, epoch: int) -> None:
        assert self.store is not None
        if slot in self.slots:
            return
        self.claimable.add(slot)
        try:
            await self.store.claim(slot, epoch)
        except StateOutdated as error:
            self._end(str(error))
        except StateError as error:  # asked again with the next answer
            logger.warning("slot_not_claimed", extra={"fields": {"slot": slot, "reason": str(error)}})
        else:
            self.slots.add(slot)

    def _end(self, reason: str) -> None:
        if not self._over:
            self._over = True
            logger.error("node_fenced", extra={"fields": {"reason": reason}})
            self._fenced()

    async def leave(self) -> None:
        """This process does nothing more."""
        self._over = True
        for task in (self._renewing, self._claiming):
            if task is not None:
                await tasks.cancelled(task)
        if self._channel is not None and not self._channel.lost:
            with suppress(ChannelLost, TimeoutError):
                left = self._channel.ask("leave", process=self.process, gives_back=self._gives_back)
                await tasks.within(1.0, left, name="leave")

    # The connection

    @asynccontextmanager
    async def running(self, pools: Pools, stack: list[dict[str, object]], admin: Admin) -> AsyncIterator[None]:
        """As `Link.running`."""
        listening = tasks.spawn(self._listen(), name="signs of life")
        try:
            async with super().running(pools, stack, admin):
                yield
        finally:
            await tasks.cancelled(listening)

    async def _listen(self) -> None:
        """Leave a control plane that is silent: its machine, or the way there, may be lost without a word. Whoever is
        named by then is connected to."""
        seconds = self.node.machines.lease
        while True:
            await asyncio.sleep(seconds / RENEWALS)
            channel = self._channel
            if channel is None or channel.lost:
                continue
            try:
                await tasks.within(SILENT * seconds, channel.ask("ping"), name="ping")
            except ChannelLost:
                continue
            except TimeoutError:
                logger.error("control_plane_silent")
                channel.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """As `Link._connect`. One that does not answer is left as soon as another is named."""
        named, patience = self._named(), SILENT * self.node.machines.lease
        reaching = asyncio.get_running_loop().create_task(self._reach(named), name="reach the control plane")
        try:
            for _ in range(round(patience / AGAIN)):
                await asyncio.wait({reaching}, timeout=AGAIN)
                if reaching.done():
                    return reaching.result()
                if self._named() != named:
                    break
            raise ConnectionAbortedError(f"{named} has not answered")
        finally:
            if not reaching.done():
                await tasks.cancelled(reaching)

    def _named(self) -> str:
        return self.node.control.read_text(encoding="ascii")

    async def _reach(self, named: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = named.rpartition(":")
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        try:
            await prove(reader, writer, self.node.machines.secret, side=CONNECTS, other=ACCEPTS)
        except BaseException:
            writer.close()
            raise
        return reader, writer

    async def _follow(self, message: Message) -> None:
        told: Any = message.fields["sections"].get(NODES)
        if told is not None:
            self._nodes, before = dict(told["slots"]), self.urls
            self.urls = {int(node): url for node, url in told["places"].items() if int(node) != self.node.index}
            for url in {*before.values()} - {*self.urls.values()}:
                self.lost(url)
        await super()._follow(message)
