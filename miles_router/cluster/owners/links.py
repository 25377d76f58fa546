"""What the processes of a router send each other: packets, with descriptors beside them, in order.

A process takes packets on one unix socket of its own (SOCK_SEQPACKET) and has a connection to that of each other. Back
come answers alone: a byte for each parcel that wants one, sent before anything is done with the parcel. So a process
that ends has answered all that it has begun, and what it has not answered can be sent to the one that comes after it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from miles_router.asgi.deadlines import Deadlines
from miles_router.cluster.peers import Peers

logger = logging.getLogger(__name__)

#: Bytes of one packet at most.
MAX_PACKET = 16 * 1024
#: Descriptors beside one packet.
MAX_DESCRIPTORS = 2
#: Parcels that wait for one process, because it is being started or reads nothing; more are refused at once.
MAX_WAITING = 4096
#: Seconds that a parcel waits before it is refused.
PATIENCE = 10.0
#: Seconds between two attempts to reach a process, and until the system may have room again.
RETRY = 0.05
#: Seconds until a connection is accepted for which there was no descriptor.
CROWDED = 1.0
#: Packets that are taken before they are answered, and where all are wanted that have arrived: an answer for many costs
#: no more than one for each.
IN_A_STEP, AT_ONCE = 8, 64
BACKLOG = 128
TAKEN, REFUSED = b"\1", b"\0"
# As numbers: Python's own cost microseconds each time they are joined
CLOEXEC = 0x40000000  # MSG_CMSG_CLOEXEC
CUT = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
BUSY = frozenset({errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS, errno.ENOMEM})


class Parcel(Protocol):
    """Something for another process."""

    #: Whether the other process answers it.
    answered: bool

    def is_called_off(self) -> bool:
        """Whether nobody wants it to be sent any more."""
        ...

    def packet(self) -> tuple[bytes, Sequence[int]]:
        """Its bytes, at most `MAX_PACKET`, and descriptors. Made when it is sent."""
        ...

    def sent(self) -> None:
        """It is on its way, or will be made anew."""
        ...

    def done(self, taken: bool) -> None:
        """It was answered, or refused here."""
        ...


#: Takes a packet and its descriptors, which it closes; gives what is to be done once it is answered.
Take = Callable[[bytes, Sequence[int]], Callable[[], None]]
#: Hears a packet that nobody answers, and the index of the process that has sent it.
Hear = Callable[[int, bytes], None]


class Links:
    """The connections of one process to all others, and theirs to it.

    Attributes:
        takers, hearers: who takes packets, by the byte with which they begin.
        greeting: gives what a process is sent first, whenever it was reached anew.
        lost: hears the index of a process that has ended.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self.takers: dict[bytes, Take] = {}
        self.hearers: dict[bytes, Hear] = {}
        self.greeting: Callable[[], Sequence[Parcel]] = tuple
        self.lost: Callable[[int], None] = lambda index: None
        self._listener: socket.socket | None = None
        self._out: dict[int, LinkTo] = {}
        self._in: set[LinkFrom] = set()
        self._waiters: list[asyncio.Future[None]] = []
        self._late: Deadlines[tuple[LinkTo, Parcel]]

    def start(self) -> None:
        """Listen, and reach all others. Called in the event loop."""
        loop = asyncio.get_running_loop()
        path = self._peers.socket_of(self._peers.index)
        with suppress(FileNotFoundError):
            os.unlink(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(path)
        self._listener.listen(BACKLOG)
        loop.add_reader(self._listener, self._accept)
        late: Deadlines[tuple[LinkTo, Parcel]] = Deadlines(PATIENCE, lambda each: each[0].give_up(each[1]), loop)
        hello = bytes([self._peers.index])
        for index in self._peers.others:
            path = self._peers.socket_of(index)
            self._out[index] = link = LinkTo(index, path, hello, late, self.greeting, self.lost, self._emptied)
            link.connect()

    def send(self, index: int, parcel: Parcel) -> None:
        """Send a parcel, once what was given before it is sent."""
        self._out[index].give(parcel)

    def tell_all(self, parcel: Parcel) -> None:
        """Send a parcel that nobody answers to all others that can be reached."""
        for link in self._out.values():
            if link.reached:
                link.give(parcel)

    @property
    def busy(self) -> bool:
        """Whether something waits for a process that can be reached."""
        return any(link.reached and link.waiting for link in self._out.values())

    async def flushed(self, seconds: float) -> None:
        """Wait until nothing does, at most so long."""
        if self.busy:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await asyncio.wait({waiter}, timeout=seconds)

    def _emptied(self) -> None:
        if self._waiters and not self.busy:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def read_now(self) -> None:
        """Take all packets that have arrived."""
        for incoming in tuple(self._in):
            while incoming.read(AT_ONCE):
                pass

    def close(self) -> None:
        """Refuse what waits, and leave. Harmless when repeated."""
        if self._listener is None:
            return
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        self._listener = None
        for link in self._out.values():
            link.close()
        for incoming in tuple(self._in):
            self._end(incoming)

    def _accept(self) -> None:
        assert self._listener is not None
        with suppress(BlockingIOError, ConnectionAbortedError):
            while True:
                try:
                    sock, _ = self._listener.accept()
                except OSError as error:
                    if error.errno in (errno.EMFILE, errno.ENFILE):
                        logger.error("no_descriptors", extra={"fields": {"for": "another process"}})
                        self._accept_later()
                        return
                    raise
                sock.setblocking(False)
                incoming = LinkFrom(sock, self.takers, self.hearers, self._reached_by, self._end)
                self._in.add(incoming)
                asyncio.get_running_loop().add_reader(sock, incoming.read, IN_A_STEP)

    def _accept_later(self) -> None:
        """The connection stays in the queue, and would wake the loop again and again."""
        assert self._listener is not None
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        loop.call_later(CROWDED, self._accept_again)

    def _accept_again(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _reached_by(self, index: int) -> None:
        """A process that has reached this one is there."""
        self._out[index].connect()

    def _end(self, incoming: LinkFrom) -> None:
        if incoming in self._in:
            self._in.discard(incoming)
            incoming.close()


class LinkTo:
    """To one process: what waits for it, and what it has not answered."""

    def __init__(
        self,
        index: int,
        path: str,
        hello: bytes,
        late: Deadlines[tuple[LinkTo, Parcel]],
        greeting: Callable[[], Sequence[Parcel]],
        lost: Callable[[int], None],
        emptied: Callable[[], None],
    ) -> None:
        self._index = index
        self._path = path
        self._hello = hello
        self._late = late
        self._loop = asyncio.get_running_loop()
        self._sock: socket.socket | None = None
        self._waiting: deque[Parcel] = deque()
        self._unanswered: deque[Parcel] = deque()
        self._watched = False
        self._closed = False
        self._greeting = greeting
        self._lost = lost
        self._emptied = emptied

    @property
    def reached(self) -> bool:
        """Whether there is a connection."""
        return self._sock is not None

    @property
    def waiting(self) -> int:
        """How many parcels wait for it."""
        return len(self._waiting)

    def give(self, parcel: Parcel) -> None:
        if self._closed or len(self._waiting) >= MAX_WAITING:
            parcel.done(False)
            return
        self._waiting.append(parcel)
        if len(self._waiting) == 1 and self._sock is not None:
            self._flush()
        if self._waiting and parcel.answered:
            self._late.start((self, parcel))

    def give_up(self, parcel: Parcel) -> None:
        """It has waited long enough."""
        with suppress(ValueError):
            self._waiting.remove(parcel)
            parcel.done(False)

    def connect(self) -> None:
        if self._closed or self._sock is not None:
            return
        sock: socket.socket | None = None
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            sock.connect(self._path)
            sock.send(self._hello)
        except OSError:  # it is not there yet, or not any more; or there is no descriptor
            if sock is not None:
                sock.close()
            self._loop.call_later(RETRY, self.connect)
            return
        self._sock = sock
        self._loop.add_reader(sock, self._read_answers)
        self._waiting.extendleft(reversed(self._greeting()))
        self._flush()

    def _flush(self) -> None:
        while self._waiting and self._sock is not None:
            parcel = self._waiting[0]
            if not parcel.is_called_off():
                data, descriptors = parcel.packet()
                try:
                    socket.send_fds(self._sock, [data], descriptors)
                except OSError as error:
                    parcel.sent()
                    if error.errno in BUSY:
                        self._wait(readable=error.errno == errno.EAGAIN)
                    else:
                        self._end()
                    return
                parcel.sent()
                if parcel.answered:
                    self._unanswered.append(parcel)
            self._waiting.popleft()
            self._late.stop((self, parcel))
        self._unwatch()
        self._emptied()

    def _wait(self, *, readable: bool) -> None:
        """The other process reads slowly, or the system has no room."""
        assert self._sock is not None
        if not readable:
            self._unwatch()
            self._loop.call_later(RETRY, self._flush)
        elif not self._watched:
            self._watched = True
            self._loop.add_writer(self._sock, self._flush)

    def _unwatch(self) -> None:
        if self._watched and self._sock is not None:
            self._loop.remove_writer(self._sock)
        self._watched = False

    def _read_answers(self) -> None:
        assert self._sock is not None
        try:
            answers = self._sock.recv(MAX_PACKET)
        except BlockingIOError:
            return
        except OSError:
            answers = b""
        if not answers:
            self._end()
            return
        for answer in answers:
            self._unanswered.popleft().done(bool(answer))

    def _end(self) -> None:
        """The other process has ended: what it has not answered waits for the next."""
        self._drop()
        self._waiting.extendleft(reversed(self._unanswered))
        for parcel in self._unanswered:
            self._late.stop((self, parcel))
            self._late.start((self, parcel))
        self._unanswered.clear()
        self._lost(self._index)
        self._loop.call_later(RETRY, self.connect)

    def _drop(self) -> None:
        if self._sock is not None:
            self._unwatch()
            self._loop.remove_reader(self._sock)
            self._sock.close()
            self._sock = None

    def close(self) -> None:
        self._closed = True
        self._drop()
        for parcel in self._waiting:
            self._late.stop((self, parcel))
            parcel.done(False)
        for parcel in self._unanswered:  # it may be taken already: nobody but the other process may answer it
            parcel.done(True)
        self._waiting.clear()
        self._unanswered.clear()


class LinkFrom:
    """From one process."""

    def __init__(
        self,
        sock: socket.socket,
        takers: Mapping[bytes, Take],
        hearers: Mapping[bytes, Hear],
        hello: Callable[[int], None],
        end: Callable[[LinkFrom], None],
    ) -> None:
        self._sock = sock
        self._takers = takers
        self._hearers = hearers
        self._hello = hello
        self._end = end
        self._index: int | None = None
        self._answers = b""
        self._then: list[Callable[[], None]] = []

    def read(self, at_once: int = 1) -> bool:
        """Take a packet, or a few. Gives whether there may be more."""
        if self._answers:  # the other side reads nothing
            return False
        ended, more = False, at_once
        while more and not ended:
            more -= 1
            try:
                data, descriptors, flags, _ = socket.recv_fds(self._sock, MAX_PACKET, MAX_DESCRIPTORS, CLOEXEC)
            except BlockingIOError:
                more = -1
                break
            except OSError:
                data, descriptors, flags = b"", [], 0
            ended = not data
            if data:
                self._take(data, descriptors, whole=not flags & CUT)
        self._answer()
        if ended:
            self._end(self)
        return not ended and not more

    def _take(self, data: bytes, descriptors: Sequence[int], *, whole: bool) -> None:
        if self._index is None:
            self._index = data[0]
            self._hello(data[0])
            return
        if (hear := self._hearers.get(data[:1])) is not None:
            hear(self._index, data)
        elif whole:
            self._then.append(self._takers[data[:1]](data, descriptors))
            self._answers += TAKEN
        else:  # this process has no room for further descriptors
            for descriptor in descriptors:
                os.close(descriptor)
            self._answers += REFUSED

    def _answer(self) -> None:
        """Answer, and begin what was taken."""
        if self._answers:
            try:
                self._sock.send(self._answers)
            except BlockingIOError:
                asyncio.get_running_loop().add_writer(self._sock, self._answer_late)
                return
            except OSError:  # it has ended; what it has sent is ours alone
                pass
        self._answers = b""
        then, self._then = self._then, []
        for begin in then:
            begin()

    def _answer_late(self) -> None:
        asyncio.get_running_loop().remove_writer(self._sock)
        self._answer()

    def close(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._sock)
        loop.remove_writer(self._sock)
        self._sock.close()
