"""What is sent again to another machine, where the connection to it was lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from miles_router.cluster.nodes.forwarding import Neighbours
from miles_router.cluster.nodes.seen import Seen
from miles_router.cluster.nodes.stamps import Address, Stamps
from miles_router.cluster.peers import Peers
from miles_router.errors import OwnerLost
from miles_router.metrics import Metrics
from tests.support.scripted_worker import reply


class Other:
    """Another machine. It answers the first request, and loses its connection over the second."""

    def __init__(self, beats: int) -> None:
        self.beat = 0
        self.taken = 0
        #: That go by meanwhile.
        self._beats = beats

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        while await reader.readline():
            await reader.readuntil(b"\r\n\r\n")
            self.taken += 1
            if self.taken == 2:
                self.beat += self._beats
                break
            writer.write(reply())
        writer.close()


async def statuses(other: Other, method: str, directory: Path) -> list[int]:
    """Of two requests to it, one after the other."""
    server = await asyncio.start_server(other.take, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    stamps = Stamps("secret", Address(0, "here"), lambda _: "there", lambda: other.beat, Seen(Peers(0, 1, directory)))
    neighbours = Neighbours(stamps, lambda _: url, connect_timeout=5.0)
    told: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        told.extend([message["status"]] if "status" in message else [])

    try:
        for _ in range(2):
            scope = {"method": method, "raw_path": b"/sessions/s", "query_string": b"", "headers": []}
            await neighbours.forward(1, scope, [], receive, send, Metrics())
        return told
    finally:
        await neighbours.close()
        server.close()


async def test_a_request_whose_connection_was_lost_is_sent_again_while_the_other_machine_remembers_it(
    tmp_path: Path,
) -> None:
    other = Other(beats=0)
    assert await statuses(other, "POST", tmp_path) == [200, 200]
    assert other.taken == 3


async def test_one_that_would_come_too_late_may_have_been_done_and_is_not_sent_again(tmp_path: Path) -> None:
    other = Other(beats=3)
    with pytest.raises(OwnerLost, match="may have done it"):
        await statuses(other, "POST", tmp_path)
    assert other.taken == 2


async def test_what_changes_nothing_is_sent_again_whenever(tmp_path: Path) -> None:
    other = Other(beats=3)
    assert await statuses(other, "GET", tmp_path) == [200, 200]
    assert other.taken == 3
