"""A client connection meets no event that its tables lack, whatever clients, apps, timers and a stop do, and when."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from miles_router.asgi.backlog import Backlog
from miles_router.asgi.exchange import Message, Receive, Scope, Send
from miles_router.metrics import ClientStatistics
from miles_router.serving import client_connection, request_reader
from miles_router.serving import client_states as states
from miles_router.serving.clients import ClientConnections
from tests.support.tiers import examples
from tests.support.wire import Wire

BODY, CHUNKED, LAST = b"Content-Length: 2\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n"
EXPECT, KEEP_ALIVE = b"Expect: 100-continue\r\n", b"Connection: keep-alive\r\n"
APPS = ["reply", "slow", "early", "hanging", "nothing", "broken", "twice", "late"]


def head(app: str, headers: bytes, version: bytes = b"1.1") -> bytes:
    return b"POST /%b HTTP/%b\r\nHost: a\r\n%b\r\n" % (app.encode(), version, headers)


def request(app: str, headers: bytes) -> bytes:
    return head(app, headers) + (b"{}" if BODY in headers else b"")


apps = st.sampled_from(APPS)
whole = st.builds(request, apps, st.sampled_from([b"", BODY, BODY + EXPECT, LAST]))
old = st.builds(head, apps, st.just(KEEP_ALIVE), st.just(b"1.0"))
begun = st.builds(head, apps, st.sampled_from([BODY, BODY + EXPECT, CHUNKED]))
rests = st.sampled_from([b"{}", b"0\r\n\r\n", b"no chunk", b"\0\r\n", b"\r\n", b"GET /re"])
sent = st.one_of(whole, whole, whole, whole, old, begun, rests)
pipelined = st.lists(st.one_of(whole, whole, old, rests), min_size=2, max_size=20).map(b"".join)
others = st.sampled_from(["run", "run", "run", "timer", "fin", "stop", "pause"])
events = st.lists(st.one_of(sent, sent, pipelined, others, others), min_size=1, max_size=10)


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    how = scope["path"][1:]
    message: Message = {"more_body": how in ("reply", "slow", "hanging")}
    while message.get("more_body"):
        message = await receive()
    if how == "nothing":
        return
    end = {"type": "http.response.body", "body": b"x"}
    if how != "hanging":
        await send({"type": "http.response.start", "status": 200})
        for _ in range(3 if how == "slow" else 0):
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            await asyncio.sleep(0)
        for _ in range({"broken": 0, "late": 0, "twice": 2}.get(how, 1)):
            await send(end)
    if how == "late":
        asyncio.get_running_loop().call_soon(send, end)
    while how == "hanging" and (await receive())["type"] != "http.disconnect":
        pass


class StrictWire(Wire):
    """A transport that refuses what a socket refuses; its client never goes on its own."""

    own_fin = False

    def write(self, data: bytes) -> None:
        assert not self.own_fin, "bytes behind a FIN"
        super().write(data)

    def write_eof(self) -> None:
        self.own_fin = True

    def get_extra_info(self, name: str) -> Any:
        options = SimpleNamespace(setsockopt=lambda *_: None, getsockopt=lambda *_: (1, 0, 0))
        return options if name == "socket" else super().get_extra_info(name)


class Scene(logging.Handler):
    """A connection, and what can happen to it."""

    def __init__(self) -> None:
        super().__init__()
        self.server = SimpleNamespace(connections=set(), tasks=set())
        self.statistics, self.wire = ClientStatistics(Backlog()), StrictWire()
        connections = ClientConnections(app, self.statistics, limit=10, idle_seconds=60, head_seconds=60)
        self.connection = connections(server_state=self.server, app_state={})
        self.connection.connection_made(cast(asyncio.BaseTransport, self.wire))
        self.shared = self.connection._shared
        self.fin = False
        self.errors: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and "part of the body" not in str(error):  # which the app sends twice
            self.errors.append(error)

    async def happens(self, what: bytes | str) -> None:
        connection = self.connection
        if what == "run":
            for _ in range(20):
                await asyncio.sleep(0)
        elif not self.server.connections:
            return
        elif isinstance(what, bytes) and self.wire.reading and not self.fin and not self.wire.closed:
            connection.data_received(what)
        elif what == "fin" and self.wire.reading and not self.fin and not self.wire.closed:
            self.fin = True
            if not connection.eof_received():
                self.wire.close()
        elif what == "timer" and (deadline := connection._deadline) is not None:
            deadline.stop(connection)
            deadline._expired(connection)
        elif what == "stop":
            connection.shutdown()
        elif what == "pause":
            (connection.resume_writing if connection.write_paused else connection.pause_writing)()
        elif what == "lost":
            self.wire.close()
            connection.connection_lost(None)

    def check(self) -> None:
        assert self.errors == []
        connection = self.connection
        state, deadline = connection._state, connection._deadline
        if state in (states.LINGERING, states.HALF_CLOSED):
            own = self.shared.lingering if state is states.LINGERING else self.shared.half_closed
            assert deadline is own, f"nothing ends a connection that is {state.value}"
        elif state is states.CLOSED:
            assert (self.wire.closed, deadline) == (True, None)
        elif state is states.STOPPING:
            assert deadline is not self.shared.idle, "the stop waits for an idle connection"
        elif state is states.FINISHING:
            assert connection._current is not None or self.wire.closed, "no reply is due"


async def lived(happening: list[bytes | str]) -> None:
    scene = Scene()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: scene.errors.append(context["exception"]))
    logger = logging.getLogger("miles_router.serving")
    logger.addHandler(scene)
    try:
        for each in [*happening, "lost", "run"]:
            await scene.happens(each)
            scene.check()
    finally:
        logger.removeHandler(scene)
    assert scene.connection._state is states.CLOSED
    assert (scene.server.connections, scene.statistics.open, scene.statistics.backlog.size) == (set(), 0, 0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@settings(max_examples=examples(1200))
@example([head("hanging", CHUNKED), b"no chunk", "fin"], 4096, 16)
@example([head("reply", KEEP_ALIVE, b"1.0") * 2, "run"], 4096, 16)
@example([head("early", b"Content-Length: 300000\r\n") + b"x" * 300_000 + b"\0\r\n", "run"], 4096, 16)
@example([head("late", BODY + EXPECT), "run"], 4096, 16)
@example([request("nothing", b""), "run", "stop"], 4096, 16)
@example(["stop", b"GET /re", "stop"], 4096, 16)
@example(["stop", b"\r\n"], 4096, 16)
@given(events, st.sampled_from([40, 4096]), st.sampled_from([2, 16]))
def test_a_connection_meets_no_event_that_its_tables_lack(
    happening: list[bytes | str], at_once: int, waiting: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_reader, "SLICE", at_once)
        patch.setattr(client_connection, "MAX_PIPELINED", waiting)
        asyncio.run(lived(happening))


@pytest.mark.parametrize("state", states.ReplyState)
@pytest.mark.parametrize("kind", ["http.response.start", "http.response.body"])
async def test_a_message_out_of_order_is_refused_and_named(state: states.ReplyState, kind: str) -> None:
    scene = Scene()
    scene.connection.data_received(head("hanging", b""))
    request = scene.connection._current
    assert request is not None
    messages: list[Message] = [{"type": "http.response.start", "status": 200}, {"type": "http.response.body"}]
    for message in messages[: {states.BEGUN: 1, states.ENDED: 2}.get(state, 0)]:
        await request.send(message)
    if state is states.LOST:
        request.lost()
    allowed = kind in {states.WAITING: [messages[0]["type"]], states.BEGUN: [messages[1]["type"]]}.get(state, [])
    if allowed or state is states.LOST:
        await request.send({"type": kind, "status": 200})
    else:
        with pytest.raises(states.InvalidTransition, match=state.value):
            await request.send({"type": kind, "status": 200})
    scene.connection.connection_lost(None)
    await scene.happens("run")
