"""Where texts belong: the process that has their root, or the one that a new root is given to.

A new root is given by one process for each, its registrar, so that requests for one new text that arrive everywhere at
once have one owner. It tells all others before the request goes on, and they read what they were told before they look:
so nobody who can know of a text misses its root.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from miles_router import tasks
from miles_router.asgi.moving import Elsewhere
from miles_router.cluster.owners.links import MAX_PACKET, Links
from miles_router.cluster.owners.roots import PACKED_SIZE, RootChange, Roots, pack, unpack
from miles_router.cluster.peers import Peers
from miles_router.errors import OwnerUnavailable
from miles_router.middlewares.roots import Root
from miles_router.slots import SLOTS

logger = logging.getLogger(__name__)

#: What a packet with changes of the directory begins with.
ROOTS = b"r"
#: Roots of all processes together; about 700 bytes each, in every process.
MAX_ROOTS = 65_536
#: A note about a request: whose text it is was looked up; it goes on from nothing that its root's owner has; or its
#: registrar has given it to this process, which may have ended since and know nothing of it. Behind it how often it was
#: sent on.
FOUND, NEW, GIVEN = b"f", b"n", b"g"
#: Processes that may send a text on before it stays where it is.
MAX_HOPS = 6
#: Seconds that a request waits at most until all others are told of its root.
TELLING = 0.5
#: Seconds after its start that a process waits at most for what others tell it, before it takes a text for a new one;
#: and that a request waits before it is refused, where texts outlive processes: whoever is silent may have it.
GREETING, PATIENCE = 2.0, 10.0


class TextOwners:
    """The directory of one process, and what others say about it."""

    def __init__(self, peers: Peers, links: Links) -> None:
        self.roots = Roots(peers.count, peers.index, MAX_ROOTS // peers.count)
        self._peers = peers
        self._links = links
        links.hearers[ROOTS] = self._hear
        links.greeting = lambda: [*_parcels(self.roots.own()), _Told(())]
        links.lost = self._lost
        self._durable = False
        self._unheard = set(peers.others)  # who has not said yet what it has
        self._heard_all = asyncio.Event()

    def start(self) -> None:
        """Hear from all others, for a while. Called in the event loop."""
        if not self._durable:
            asyncio.get_running_loop().call_later(GREETING, self._heard, tuple(self._unheard))

    def hold(self, roots: Sequence[Root]) -> None:
        """Called before `start`: texts outlive processes, and this one has those of these roots, the newest last."""
        self._durable = True
        for root in roots[-self.roots.limit :]:
            self.roots.apply(RootChange(root, self._peers.index, True))

    def _lost(self, index: int) -> None:
        if self._durable:
            self.roots.doubt(index)
        else:
            self.roots.lose(index)

    def _heard(self, indices: Iterable[int]) -> None:
        self._unheard.difference_update(indices)
        if not self._unheard:
            self._heard_all.set()

    async def require(self, note: bytes, texts: Sequence[str], continues: Callable[[str], bool]) -> None:
        """As `Owners.require_text`, of a request that came with this note."""
        kind, hops = (note[:1], note[1]) if note else (b"", 0)
        if hops >= MAX_HOPS:
            logger.warning("text_without_owner", extra={"fields": {"process": self._peers.index}})
            return
        await self._hear_all()
        roots = [Root.of(text) for text in texts]
        begun = self._roots_of(texts)
        owner = self._owner_of(roots if kind in (NEW, GIVEN) else begun)
        known = any(self.roots.owner(root) is not None for root in roots)
        if owner == self._peers.index and not known and not any(map(continues, texts)):
            owner, kind = None, NEW  # they have the beginning of a held text, and nothing that was sampled for it
        if owner is None:
            owner, kind = await self._give(roots, kind, hops)
        if owner != self._peers.index:
            raise Elsewhere(owner, _note(GIVEN if kind in (NEW, GIVEN) else FOUND, hops))
        for root in self._roots_of(texts):
            self.roots.use(root)
        orphans = [root for text, root in zip(texts, roots, strict=True) if self.roots.find(text) is None]
        await self._tell([*self.roots.give(orphans, owner), *self.roots.evicted()])

    async def _give(self, roots: Sequence[Root], kind: bytes, hops: int) -> tuple[int, bytes]:
        """The owner that roots without one are given, and the note that is sent along.

        Raises:
            Elsewhere: their registrar gives them.
        """
        registrar = roots[0].digest[0] % SLOTS % self._peers.count
        if kind == GIVEN:
            owner = self._peers.index
        elif registrar == self._peers.index:
            owner = self.roots.least()
        else:  # whoever sent it here for what it begins with knows more than there is: it is new
            raise Elsewhere(registrar, _note(NEW if kind else FOUND, hops))
        await self._tell(self.roots.give(roots, owner))
        return owner, GIVEN

    async def owner(self, text: str) -> int | None:
        """As `Owners.owner_of_text`."""
        await self._hear_all()
        owner = self._owner_of(self._roots_of([text]))
        return None if owner == self._peers.index else owner

    async def _hear_all(self) -> None:
        try:
            if self._unheard:
                await tasks.within(PATIENCE, self._heard_all.wait(), name="hear from all processes")
        except TimeoutError:
            raise OwnerUnavailable("a process that may have this text is being started; ask again") from None

    def _roots_of(self, texts: Iterable[str]) -> list[Root]:
        """The roots with which texts begin."""
        self._links.read_now()  # whatever was given before a client could go on from it has arrived
        return [found[0] for text in texts if (found := self.roots.find(text)) is not None]

    def _owner_of(self, roots: Iterable[Root]) -> int | None:
        """Who has most of these."""
        bytes_of: Counter[int] = Counter()
        for root in roots:
            if (owner := self.roots.owner(root)) is not None:
                bytes_of[owner] += root.length
        return max(bytes_of, key=lambda owner: (bytes_of[owner], -owner), default=None)

    async def _tell(self, changes: Sequence[RootChange]) -> None:
        for parcel in _parcels(changes):
            self._links.tell_all(parcel)
        if changes:
            await self._links.flushed(TELLING)

    def _hear(self, index: int, data: bytes) -> None:
        for change in unpack(memoryview(data)[len(ROOTS) :]):
            self.roots.apply(change)
        if len(data) == len(ROOTS):
            self.roots.settle(index)
            self._heard((index,))


class _Told:
    """Changes for one process, as a parcel."""

    answered = False

    def __init__(self, changes: Sequence[RootChange]) -> None:
        self._data = ROOTS + pack(changes)

    def is_called_off(self) -> bool:
        return False

    def packet(self) -> tuple[bytes, Sequence[int]]:
        return self._data, ()

    def sent(self) -> None:
        pass

    def done(self, taken: bool) -> None:
        pass


def _parcels(changes: Sequence[RootChange]) -> list[_Told]:
    at_once = MAX_PACKET // PACKED_SIZE - 1
    return [_Told(changes[start : start + at_once]) for start in range(0, len(changes), at_once)]


def _note(kind: bytes, hops: int) -> bytes:
    return kind + bytes([hops + 1])
