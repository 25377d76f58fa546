"""The innermost ASGI app: reads the request, forwards it to a worker, and relays the reply chunk by chunk.

Bodies are not parsed here. The request is buffered whole, so that it can be retried on another worker; the reply is
never buffered whole.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from miles_router.asgi.exchange import Exchange, Outlet, Receive, Routing, Scope, Send
from miles_router.asgi.watch import Watch
from miles_router.asgi.wire import HOP_BY_HOP, RawHeaders, end_to_end, first_header
from miles_router.engines.generate import UnknownShape
from miles_router.engines.paths import GENERATE
from miles_router.engines.stream_end import PATHS as STREAMS
from miles_router.engines.stream_end import StreamEnd
from miles_router.errors import BadRequest, ClientDisconnected, FleetPaused, UpstreamBroken
from miles_router.fleet.evaluation import HEADER
from miles_router.fleet.gate import endpoint
from miles_router.fleet.inflight import InFlight, aborted_in_the_queue
from miles_router.fleet.placement.sessions import Affinity
from miles_router.forwarding.forwarded import AnyReply, Outgoing, outgoing
from miles_router.forwarding.forwarder import ABORTED, Forwarder
from miles_router.forwarding.pairs import PairInterrupted
from miles_router.forwarding.reply import CountsBytes, Reply
from miles_router.forwarding.translated import HeldReply
from miles_router.forwarding.upstream import NotAdmitted
from miles_router.metrics import Metrics

if TYPE_CHECKING:
    from miles_router.partial_rollouts.moves.moved import MovedAnswer

OK, NOT_MODIFIED = 200, 304
STREAM = b"text/event-stream"
NO = b"false"
NO_EVALUATION = (
    "X-Evaluation has no effect here: name a session that began as an evaluation, or send a text to /generate where "
    "RadixTreeMiddleware is in use"
)


class Proxy:
    """An ASGI app that forwards every request to one worker of the pool."""

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
            BodyTooLarge, ClientDisconnected, FleetPaused, and the errors of `Forwarder.open`.
            BadRequest: the request asks for an evaluation, and no middleware has made it one.
            UpstreamBroken, UpstreamTimeout: possibly after the reply has begun; the caller must then break the client's
                connection off.
        """
        exchange = Exchange.of(scope)
        body = await exchange.read(receive)
        self._metrics.bytes_in += len(body)
        request = outgoing(scope, exchange.request_id, body, self._affinity)
        routing = exchange.routing
        if request.generates and routing.evaluation is None and dict(scope["headers"]).get(HEADER, NO) != NO:
            raise BadRequest(NO_EVALUATION)
        if routing.worker_headers is not None and request.generates:
            request.headers = routing.worker_headers(request.headers, request.key)
        request.preferred = routing.preferred
        routing.movable = request.key is None and request.path == GENERATE and routing.continued_cache is None
        self._in_flight.enter(exchange, body)
        try:
            while True:
                if self._forwarder.must_wait(request, routing):
                    with Watch(receive, 0):  # the request timeout starts when the request is sent
                        await self._forwarder.wait(request, routing)
                    if routing.aborted:
                        await self._answer_aborted(scope, exchange, body, send)
                        return
                try:
                    with Watch(receive, self._request_timeout) as watch:
                        routing.stop = watch.stop
                        receiver = await self._forward(request, routing, scope, receive, send)
                    break
                except NotAdmitted as interrupted:
                    routing.worker_url = None  # no worker has the request now
                    routing.mark("not_admitted")
                    if isinstance(interrupted, PairInterrupted) and _is_final(interrupted, exchange, scope["path"]):
                        await self._answer_aborted(scope, exchange, body, send)
                        return
                finally:
                    routing.stop = None
        except ClientDisconnected:
            self._forwarder.abandoned.abort(request)
            raise
        finally:
            self._in_flight.leave(exchange)
        if receiver is not None:
            await receiver.finish()

    async def _answer_aborted(self, scope: Scope, exchange: Exchange, body: bytes, send: Send) -> None:
        """Answer a request that was aborted while it waited at the gate, like an engine that aborts a queued request.

        Raises:
            FleetPaused: the request is not a valid `/generate` request.
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
        self, request: Outgoing, routing: Routing, scope: Scope, receive: Receive, send: Send
    ) -> MovedAnswer | None:
        """Send the request to a worker and relay its reply.

        Return None if the client has its answer. If another worker continues the generation, return the receiver that
        took the reply and will answer the client.
        """
        forwarded = await self._forwarder.open(request, routing)
        routing.first_byte_at = time.perf_counter()
        routing.mark("first_byte", forwarded.worker)
        move = routing.move
        receiver = None if move is None else move.reply_receiver(scope, receive, send)
        try:
            end = stream_end(scope["path"], forwarded.reply, send)
            sink = send if receiver is None else receiver.receive_message
            await relay(forwarded.reply, sink, self._metrics, end, routing)
        except UpstreamBroken:
            if receiver is None:
                raise
        finally:
            forwarded.close()
            routing.mark("reply_ended")  # if the reply was interrupted; `relay` marks the end of a whole one
        return receiver


def stream_end(path: str, reply: AnyReply, send: Send) -> StreamEnd | None:
    """Attach a checker for the regular end of a stream of a generation, and return it.

    Return None for other replies, and if a layer reads the stream: layers check its end themselves.
    """
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
    reply.observe(end.scan)
    return end


async def relay(
    reply: AnyReply, send: Send, metrics: CountsBytes, end: StreamEnd | None = None, routing: Routing | None = None
) -> None:
    """Send a reply to the client as it arrives.

    Args:
        end: the checker for the regular end of a stream.
        routing: gets a mark at the moment when the last chunk has arrived.

    Raises:
        UpstreamBroken: the connection is lost inside the body, or the stream lacks its regular end.
    """
    await send(
        {
            "type": "http.response.start",
            "status": reply.status,
            "headers": _reply_headers(reply.status, reply.headers),
        }
    )
    if isinstance(reply, Reply) and not reply.complete and isinstance(send, Outlet) and send.sink is not None:
        await reply.pipe_to(send.sink, metrics)
    more = True
    while more:
        chunk = reply.read_available() or await reply.read()
        more = not reply.exhausted
        metrics.bytes_out += len(chunk)
        missing = None if more or end is None else end.missing()
        if missing is not None:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            raise UpstreamBroken(f"the worker's stream ended without {missing}")
        if not more and routing is not None:
            routing.mark("reply_ended")  # before a layer gets the chunk, which may read and record it
        await send({"type": "http.response.body", "body": chunk, "more_body": more})


def _is_final(interrupted: PairInterrupted, exchange: Exchange, path: str) -> bool:
    """Return True if the request must not be sent again.

    A client aborted it, or it is a `/generate` request that was cut, which another layer or the client resumes.
    """
    return exchange.routing.aborted or (interrupted.cut and endpoint(path) == GENERATE)


def _reply_headers(status: int, headers: RawHeaders) -> RawHeaders:
    kept = end_to_end(headers, HOP_BY_HOP)
    if status == NOT_MODIFIED:
        # 304 has no body; with its Content-Length, the server towards the client would wait for one.
        kept = [pair for pair in kept if pair[0] != b"content-length"]
    return kept
