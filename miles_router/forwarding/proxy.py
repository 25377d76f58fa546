"""The innermost app: read the request, lease a worker, relay the reply chunk by chunk, give the lease back.

Bodies are not parsed here. The request is held whole, so that it can go to a second worker; the reply never is.
"""

from __future__ import annotations

import time

from miles_router.asgi.exchange import Exchange, Receive, Scope, Send
from miles_router.asgi.flight import Flight, Relief
from miles_router.asgi.headers import HOP_BY_HOP, RawHeaders, end_to_end, first_header
from miles_router.asgi.outlet import Outlet
from miles_router.asgi.watch import Watch
from miles_router.engines.generate import UnknownShape
from miles_router.engines.paths import GENERATE
from miles_router.engines.stream_end import PATHS as STREAMS
from miles_router.engines.stream_end import StreamEnd
from miles_router.errors import BadRequest, ClientDisconnected, FleetPaused, UpstreamBroken
from miles_router.fleet.affinity import Affinity
from miles_router.fleet.gate import endpoint
from miles_router.fleet.inflight import InFlight, aborted_in_the_queue
from miles_router.forwarding.forwarded import AnyReply
from miles_router.forwarding.forwarder import ABORTED, Forwarder
from miles_router.forwarding.outgoing import Outgoing, outgoing
from miles_router.forwarding.pairs import PairInterrupted
from miles_router.forwarding.reply import CountsBytes, Reply
from miles_router.forwarding.translated import HeldReply
from miles_router.forwarding.upstream import NotAdmitted
from miles_router.metrics import Metrics

OK, NOT_MODIFIED = 200, 304
STREAM = b"text/event-stream"


class Proxy:
    """ASGI app that forwards every request to one worker of the pool."""

    def __init__(
        self,
        forwarder: Forwarder,
        metrics: Metrics,
        *,
        in_flight: InFlight,
        request_timeout: float,
        affinity: Affinity,
    ) -> None:
        self._affinity = affinity
        self._forwarder = forwarder
        self._metrics = metrics
        self._request_timeout = request_timeout
        self._in_flight = in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward one HTTP request.

        Raises:
            RouterError: the errors of `Forwarder.open`; `BodyTooLarge`; `ClientDisconnected`; `FleetPaused`;
                `UpstreamBroken` or `UpstreamTimeout` even after the reply has begun, when the client's connection must
                be broken off.
        """
        exchange = Exchange.of(scope)
        body = await exchange.read(receive)
        self._metrics.bytes_in += len(body)
        request = outgoing(scope, exchange.request_id, body, self._affinity)
        flight = exchange.flight
        if flight.worker_headers is not None and request.generates:
            request.headers = flight.worker_headers(request.headers, request.key)
        request.preferred = flight.preferred
        flight.movable = request.key is None and request.path == GENERATE and flight.goes_on is None
        self._in_flight.enter(exchange, body)
        try:
            while True:
                if self._forwarder.must_wait(request, flight):
                    with Watch(receive, 0):  # the time that a worker may take has not begun
                        await self._forwarder.wait(request, flight)
                    if flight.aborted:
                        await self._answer_aborted(scope, exchange, body, send)
                        return
                try:
                    with Watch(receive, self._request_timeout) as watch:
                        flight.stop = watch.stop
                        relief = await self._forward(request, flight, scope, receive, send)
                    break
                except NotAdmitted as interrupted:
                    flight.worker_url = None  # nobody has it
                    flight.mark("not_admitted")
                    if isinstance(interrupted, PairInterrupted) and _is_over(interrupted, exchange, scope["path"]):
                        await self._answer_aborted(scope, exchange, body, send)
                        return
                finally:
                    flight.stop = None
        except ClientDisconnected:
            self._forwarder.left.abort(request)
            raise
        finally:
            self._in_flight.leave(exchange)
        if relief is not None:
            await relief.finish()

    async def _answer_aborted(self, scope: Scope, exchange: Exchange, body: bytes, send: Send) -> None:
        """An abort ends a request that waits at the gate, as it ends one in a worker's queue: no worker hears of it.

        Raises:
            FleetPaused: it is none of `/generate`.
        """
        aborted = FleetPaused(ABORTED)
        if endpoint(scope["path"]) != GENERATE:
            raise aborted
        try:
            kind, answer = aborted_in_the_queue(exchange.loads(body))
        except (BadRequest, UnknownShape):
            raise aborted from None
        headers = [(b"content-type", kind), (b"content-length", str(len(answer)).encode("ascii"))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer, "more_body": False})

    async def _forward(
        self, request: Outgoing, flight: Flight, scope: Scope, receive: Receive, send: Send
    ) -> Relief | None:
        """Ask a worker, and relay its reply; gives who answers the client, where that is somebody else."""
        forwarded = await self._forwarder.open(request, flight)
        flight.first_byte_at = time.perf_counter()
        flight.mark("first_byte", forwarded.worker)
        relief = None if flight.move is None else flight.move.relief(scope, receive, send)
        try:
            end = stream_end(scope["path"], forwarded.reply, send)
            await relay(forwarded.reply, send if relief is None else relief.take, self._metrics, end, flight)
        except UpstreamBroken:
            if relief is None:
                raise
        finally:
            forwarded.close()
            flight.mark("reply_ended")  # where the reply was cut; of a whole one `relay` has said it
        return relief


def stream_end(path: str, reply: AnyReply, send: Send) -> StreamEnd | None:
    """Return what looks at a stream that generates and that no layer reads: layers know more of its end."""
    content_type = first_header(reply.headers, b"content-type") or b""
    if (
        isinstance(reply, HeldReply)
        or reply.status != OK
        or path not in STREAMS
        or not isinstance(send, Outlet)
        or not content_type.startswith(STREAM)
    ):
        return None
    end = StreamEnd(path)
    reply.show(end.look)
    return end


async def relay(
    reply: AnyReply, send: Send, metrics: CountsBytes, end: StreamEnd | None = None, flight: Flight | None = None
) -> None:
    """Give a client a reply as it arrives. `flight` keeps the moment at which the last of it has come.

    Raises:
        UpstreamBroken: the reply is lost inside its body, or its answer has not come to its `end`.
    """
    await send(
        {
            "type": "http.response.start",
            "status": reply.status,
            "headers": _reply_headers(reply.status, reply.headers),
        }
    )
    if isinstance(reply, Reply) and not reply.complete and isinstance(send, Outlet) and send.sink is not None:
        await reply.pour(send.sink, metrics)
    more = True
    while more:
        chunk = reply.take() or await reply.read()
        more = not reply.exhausted
        metrics.bytes_out += len(chunk)
        missing = None if more or end is None else end.missing()
        if missing is not None:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            raise UpstreamBroken(f"the worker's stream ended without {missing}")
        if not more and flight is not None:
            flight.mark("reply_ended")  # before a layer is given it, which may read and record it
        await send({"type": "http.response.body", "body": chunk, "more_body": more})


def _is_over(interrupted: PairInterrupted, exchange: Exchange, path: str) -> bool:
    """Whether a request is not asked again: a client has aborted it, or it is one that others carry on."""
    return exchange.flight.aborted or (interrupted.cut and endpoint(path) == GENERATE)


def _reply_headers(status: int, headers: RawHeaders) -> RawHeaders:
    kept = end_to_end(headers, HOP_BY_HOP)
    if status == NOT_MODIFIED:
        # The length of a body that is not there: the server in front of us would wait for it.
        kept = [pair for pair in kept if pair[0] != b"content-length"]
    return kept
