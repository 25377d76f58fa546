"""Packets between processes: answered before anything is done with them, and sent again to who comes after."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from miles_router.cluster.owners.links import Links
from miles_router.cluster.peers import Peers
from tests.support.descriptors import no_descriptors
from tests.support.waiting import until


class Note:
    """A parcel of a few bytes, with one end of a socket."""

    answered = True

    def __init__(self, text: bytes) -> None:
        self.text = text
        self.answers: list[bool] = []
        self.ours, self._theirs = socket.socketpair()

    def is_called_off(self) -> bool:
        return False

    def packet(self) -> tuple[bytes, Sequence[int]]:
        return b"n" + self.text, [self._theirs.fileno()]

    def sent(self) -> None:
        pass

    def done(self, taken: bool) -> None:
        self.answers.append(taken)
        self.ours.close()
        self._theirs.close()


def taker(links: Links) -> list[bytes]:
    """What `links` takes from now on, as it is begun."""
    taken: list[bytes] = []

    def take(data: bytes, descriptors: Sequence[int]) -> Callable[[], None]:
        os.close(descriptors[0])
        return lambda: taken.append(data[1:])

    links.takers[b"n"] = take
    return taken


async def test_what_an_ended_process_has_not_answered_goes_to_the_next_in_order(tmp_path: Path) -> None:
    first = Links(Peers(0, 2, tmp_path))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(Peers(0, 2, tmp_path).socket_of(1))
    listener.listen()
    listener.setblocking(False)
    loop = asyncio.get_running_loop()
    first.start()
    try:
        accepted, _ = await loop.sock_accept(listener)
        notes = [Note(b"%d" % each) for each in range(5)]
        for note in notes:
            first.send(1, note)
        assert [await loop.sock_recv(accepted, 100) for _ in range(3)] == [b"\0", b"n0", b"n1"]
        await loop.sock_sendall(accepted, b"\1")
        await until(lambda: notes[0].answers == [True], "the first is answered")
        accepted.close()
        listener.close()
        second = Links(Peers(1, 2, tmp_path))
        taken = taker(second)
        second.start()
        await until(lambda: all(note.answers for note in notes), "all are answered")
        await until(lambda: len(taken) == 4, "all are begun")
        second.close()
        assert taken == [b"1", b"2", b"3", b"4"]
        assert [note.answers for note in notes] == [[True]] * 5
    finally:
        first.close()


async def test_more_than_the_system_holds_for_one_that_does_not_read_waits_and_comes_in_order(tmp_path: Path) -> None:
    links = [Links(Peers(index, 2, tmp_path)) for index in range(2)]
    taken = taker(links[1])
    for each in links:
        each.start()
    try:
        notes = [Note(b"%d " % place + b"x" * 10_000) for place in range(200)]
        for note in notes:  # in one step of the loop, so that nobody reads
            links[0].send(1, note)
        await until(lambda: len(taken) == len(notes), "all have come")
        assert taken == [note.text for note in notes]
        await until(lambda: all(note.answers == [True] for note in notes), "each is answered once")
    finally:
        for each in links:
            each.close()


async def test_a_process_without_a_descriptor_says_so_and_takes_the_connection_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    links = Links(Peers(0, 2, tmp_path))
    links.start()
    other = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        with no_descriptors():
            other.connect(Peers(0, 2, tmp_path).socket_of(0))
            links._out[1].connect()  # what it tries by itself, too
            for _ in range(20):
                await asyncio.sleep(0)
        said = [record.message for record in caplog.records]
        assert said == ["no_descriptors"], "the loop does not turn for it"
        await until(lambda: len(links._in) == 1, "it is accepted")
    finally:
        other.close()
        links.close()
