"""One request to both workers of a prefill/decode pair, and the single reply made from their two answers.

The client receives nothing before the prefill worker has handed over the KV cache of the prompt. Until then, losing
either worker is a loss before the reply, and the request is retried with another worker in its place. From then on the
decode worker answers alone. Closing the connection to one worker makes its engine drop state that the other worker
will never fetch.
"""

from __future__ import annotations

import asyncio
import random
from asyncio import FIRST_COMPLETED
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from miles_router import tasks
from miles_router.asgi.exchange import Routing
from miles_router.asgi.wire import first_header
from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.engine import CannotServe
from miles_router.engines.events import Event
from miles_router.engines.known import USUAL
from miles_router.engines.names import Names
from miles_router.engines.pairs.held_rows import RowStrings
from miles_router.engines.pairs.joining import first_version, join_answer, join_event
from miles_router.engines.pairs.prefill import PrefillAnswer, has_error, reports_abort
from miles_router.engines.pairs.request import ROOM_BITS, PairedRequest
from miles_router.errors import UpstreamBroken, UpstreamError, UpstreamUnreachable
from miles_router.fleet.worker_table import Lease
from miles_router.fleet.workers import BOOTSTRAP_PORT, Worker
from miles_router.forwarding.forwarded import Outgoing, PairHistory, send
from miles_router.forwarding.reply import Reply
from miles_router.forwarding.translated import EVENTS, FAILED, OK, HeldReply, RewrittenStream
from miles_router.forwarding.upstream import Admit, NotAdmitted, Upstream

#: Seconds to wait after one worker's failure, because the other worker's answer may contain the reason.
REASON_TIMEOUT = 10.0
#: How often one request is repeated because weights changed in the meantime.
MAX_INTERRUPTIONS = 8


class PairInterrupted(NotAdmitted):
    """The request must be sent again; the client has received nothing.

    `cut` is True if a pause or an abort ended the attempt before the prompt was handed over, False if weights changed.
    """

    def __init__(self, *, cut: bool) -> None:
        super().__init__()
        self.cut = cut


class PrefillLost(UpstreamUnreachable):
    """The prefill worker was lost before it handed the prompt over."""

    def __init__(self, worker: Worker, error: Exception) -> None:
        known = error if isinstance(error, UpstreamUnreachable) else UpstreamUnreachable(str(error))
        super().__init__(
            str(error),
            refused=known.refused,
            given_up=known.given_up,
            exhausted=known.exhausted,
            timed_out=known.timed_out,
            kept=known.kept,
        )
        self.worker = worker


class PairWeights(NamedTuple):
    """The prefill worker's weight version, and for each worker a number that changes with its weights."""

    version: str | None
    prefill: int
    decode: int


@dataclass(frozen=True)
class Halves:
    """The prefill and the decode worker of one request."""

    prefill: Lease
    decode: Worker

    @property
    def bootstrap_address(self) -> tuple[str, int]:
        """Host and bootstrap port of the prefill worker, where the decode worker fetches the KV cache."""
        worker = self.prefill.worker
        assert worker.bootstrap_port is not None
        return worker.address.host, worker.bootstrap_port

    def weights(self) -> PairWeights:
        """Return the present weights of both workers."""
        worker = self.prefill.worker
        return PairWeights(worker.weight_version, worker.caches.number, self.decode.caches.number)

    def check(self) -> None:
        """Check that both workers report the role that they are registered with.

        A prefill worker that is used as an ordinary one returns one token, which would look like a complete answer.

        Raises:
            CannotServe: a worker reports another role, needs translation, or lacks the bootstrap port.
        """
        for worker in (self.prefill.worker, self.decode):
            half = worker.facts.half if worker.facts is not None else None
            if half is not None and half != worker.role.value:
                raise CannotServe(f"{worker.url} is registered as {worker.role.value}, but reports that it is {half}")
            if worker.engine is not None and worker.engine.translates:
                raise CannotServe(f"{worker.url} cannot be in a pair: its engine is {worker.engine.kind}")
        if self.prefill.worker.bootstrap_port is None:
            raise CannotServe(f"prefill worker {self.prefill.worker.url} is registered without {BOOTSTRAP_PORT}")


#: The reply types of a pair.
PairReply = Reply | HeldReply | RewrittenStream


class PairExchange:
    """One attempt to send a request to a pair.

    Args:
        history: the request's earlier attempts.
        paired: the request as both workers get it.
        body: the body of `paired` with the generation names and the cache key of this attempt.
        names: the generation names of this attempt.
        admit: returns True if the request may be written now.
        cut: returns True if a pause or an abort has happened since the attempt began.
        limit: maximum bytes of an answer to buffer.
    """

    def __init__(
        self,
        upstream: Upstream,
        halves: Halves,
        request: Outgoing,
        history: PairHistory,
        paired: PairedRequest,
        body: bytes,
        names: Names,
        *,
        admit: Admit,
        cut: Callable[[], bool],
        limit: int,
    ) -> None:
        self._upstream = upstream
        self._halves = halves
        self._request = request
        self._history = history
        self._paired = paired
        self._names = names
        engine = halves.decode.engine or USUAL
        self._body = engine.with_room(body, *halves.bootstrap_address, random.getrandbits(ROOM_BITS))
        self._admit = admit
        self._was_cut = cut
        self._limit = limit
        self._weights = halves.weights()
        self._decode_reply: Reply | None = None

    async def open(self, routing: Routing | None) -> PairReply:
        """Send the request to both workers, and wait until the reply for the client is certain.

        Raises:
            PrefillLost: the prefill worker was lost.
            UpstreamUnreachable: the decode worker was lost.
            UpstreamError: an answer cannot be read, or the two answers contradict each other.
            NotAdmitted: the request may not be written now, or (`PairInterrupted`) must be sent again.
        """
        loop = asyncio.get_running_loop()
        prefill = loop.create_task(self._prefill(routing), name="prefill half")
        decode = loop.create_task(self._decode(), name="decode half")
        try:
            await self._wait(prefill, decode)
            answer = prefill.result() if prefill.done() else None
            if isinstance(answer, PrefillAnswer) and decode.result().status == OK:
                reply = await self._join_answers(answer, decode.result())
            else:
                held = answer if isinstance(answer, HeldReply) else None
                reply = await self._refusal(held, decode.result() if decode.done() else None)
            if isinstance(reply, HeldReply):
                return reply
            self._decode_reply = None  # the caller closes it
            return reply
        finally:
            for task in (prefill, decode):
                task.cancel()
            await asyncio.wait({prefill, decode})
            for task in (prefill, decode):
                if not task.cancelled():
                    task.exception()  # mark it as retrieved, or asyncio logs it
            if self._decode_reply is not None:
                self._decode_reply.close()

    async def _wait(self, prefill: asyncio.Task[PrefillAnswer | HeldReply], decode: asyncio.Task[Reply]) -> None:
        """Wait until both tasks are done, or one result decides the reply alone (the other task might never end).

        After one worker's failure, wait up to REASON_TIMEOUT for the other worker, whose answer may contain the reason.

        Raises:
            The errors of either task.
        """
        while True:
            held = prefill.result() if prefill.done() else None
            status = decode.result().status if decode.done() else None
            if held is not None and status is not None:
                return
            failed = status is not None and status >= FAILED
            if isinstance(held, HeldReply):
                failed = held.failed
                if not failed:
                    return
            if status not in (None, OK) and not failed:
                return
            going = {each for each in (prefill, decode) if not each.done()}
            done, _ = await asyncio.wait(going, timeout=REASON_TIMEOUT if failed else None, return_when=FIRST_COMPLETED)
            if not done:
                return

    async def _prefill(self, routing: Routing | None) -> PrefillAnswer | HeldReply:
        """Send to the prefill worker, and return its answer, or a HeldReply if that must be the client's reply.

        It must be if it is a refusal, an abort or a failure: the decode worker would wait forever for the KV cache.

        Raises:
            PrefillLost, NotAdmitted, UpstreamError.
        """
        worker = self._halves.prefill.worker
        if routing is not None:
            routing.prefill_url = worker.url
        answered = False
        try:
            reply = await send(self._upstream, worker, self._request, body=self._body, slot=False, admit=self._admit)
            try:
                body, rows = await self._read(reply)
                answered = reply.status == OK
            finally:
                reply.close()
        except (UpstreamUnreachable, UpstreamBroken) as error:
            raise PrefillLost(worker, error) from error
        finally:
            self._halves.prefill.release(answered=answered)
            if routing is not None:
                routing.prefill_url = None
        if reply.status != OK:
            return self._buffered_reply(reply, rows.with_own_rows(body))
        try:
            answer = PrefillAnswer.read(self._request.endpoint, body, rows, streamed=_is_stream(reply))
        except UnreadableAnswer as error:
            raise UpstreamError(f"the answer of {worker.url} cannot be read: {error}") from error
        if answer.outcome == "partly_aborted":
            raise PairInterrupted(cut=True)
        if answer.outcome == "handed_over":
            self._check_first_token(answer)
            return answer
        return self._buffered_reply(reply, rows.with_own_rows(body), failed=answer.outcome == "failed")

    async def _decode(self) -> Reply:
        """Send to the decode worker, and return its reply, whose head has arrived."""
        self._decode_reply = await send(
            self._upstream, self._halves.decode, self._request, body=self._body, admit=self._admit
        )
        return self._decode_reply

    async def _refusal(self, prefill: HeldReply | None, decode: Reply | None) -> PairReply:
        """Return the client's reply if there is no answer: an abort, a refusal, or the reason of a failure.

        Raises:
            PairInterrupted: a pause or an abort caused the failure.
        """
        if prefill is not None and not prefill.failed:
            return prefill
        refusal, beginning = prefill, b"" if prefill is None else prefill.beginning
        if decode is not None and decode.status != OK:
            refusal = self._buffered_reply(decode, [await decode.read_all(self._limit)])
            beginning += refusal.beginning
        elif decode is not None:
            with suppress(TimeoutError):  # a stream whose first bytes contain the reason, or no bytes
                beginning += await tasks.within(REASON_TIMEOUT, decode.peek(), name="decode half's reason")
        if self._was_cut() or reports_abort(beginning):
            raise PairInterrupted(cut=True)
        assert refusal is not None
        return refusal

    async def _join_answers(self, prefill: PrefillAnswer, reply: Reply) -> PairReply:
        """Return the decode worker's answer, completed with the prefill worker's data. Raises the errors of `open`."""
        try:
            if _is_stream(reply):
                return await self._join_stream(prefill, reply)
            body, rows = await self._read(reply)
        except UpstreamBroken as error:  # the client has received nothing, so a retry is safe
            raise UpstreamUnreachable(str(error)) from error
        changed = self._halves.weights().decode != self._weights.decode
        try:
            whole = join_answer(body, rows, prefill, self._paired, changed=changed)
        except UnreadableAnswer as error:
            raise UpstreamError(f"the answers of a prefill/decode pair cannot be joined: {error}") from error
        return self._buffered_reply(reply, whole)

    async def _read(self, reply: Reply) -> tuple[bytes, RowStrings]:
        """Read the rest of a reply. Return it without its row strings (large base64 fields), and the row strings.

        Raises:
            UpstreamBroken: the connection was lost inside the body.
            UpstreamError: the body is longer than the limit.
        """
        rows, remains, size = RowStrings(self._paired.rows), [], 0
        while chunk := await reply.read():
            remains.append(rows.feed(chunk))
            size += len(chunk)
            if size > self._limit:
                raise UpstreamError(f"the reply is longer than {self._limit} bytes")
        return b"".join((*remains, rows.end())), rows

    def _buffered_reply(self, reply: Reply, pieces: Sequence[bytes], *, failed: bool = False) -> HeldReply:
        """Return a complete reply with the client's generation names."""
        named = [self._names.to_client(piece) for piece in pieces] if self._names else pieces
        return HeldReply(reply.status, reply.headers, named, failed=failed)

    async def _join_stream(self, prefill: PrefillAnswer, reply: Reply) -> PairReply:
        """Return the decode worker's stream after its first bytes have arrived.

        Its events cannot express that the first token was sampled with other weights, so the versions must be equal.

        Raises:
            PairInterrupted: the weight versions differ, or a pause or an abort made the stream fail.
            UpstreamError: the weights changed in too many attempts.
        """
        first_bytes = await reply.peek()
        if has_error(first_bytes) and (self._was_cut() or reports_abort(first_bytes)):
            raise PairInterrupted(cut=True)
        version = first_version(first_bytes) or self._halves.decode.weight_version
        if None not in (prefill.version, version) and prefill.version != version:
            self._interrupt(f"{self._halves.decode.url} has weights {version}, its prefill worker {prefill.version}")
        if not (self._paired.rows or self._paired.prompt_logprobs or self._names):
            return reply
        rows = RowStrings(self._paired.rows)
        prefill_metas = prefill.metas() if self._paired.rows or self._paired.prompt_logprobs else {}

        def rewrite(event: Event) -> bytes:
            joined = join_event(event, rows, prefill, prefill_metas, self._paired) if prefill_metas else None
            written, *others = joined or [event.raw]
            return b"".join((self._names.to_client(written), *others))

        return RewrittenStream(reply, rewrite, self._limit, rows)

    def _check_first_token(self, prefill: PrefillAnswer) -> None:
        """Check that the prefill worker's weights did not change during the attempt.

        It reports the weights that it has after the handover. If they changed, the weights that sampled the first token
        are unknown.

        Raises:
            PairInterrupted: the weights changed.
            UpstreamError: they changed in too many attempts.
        """
        worker = self._halves.prefill.worker
        before = self._history.versions.get(worker, self._weights.version)
        if prefill.version is not None:
            self._history.versions[worker] = prefill.version
        changed = self._halves.weights().prefill != self._weights.prefill
        behind = None not in (before, prefill.version) and before != prefill.version
        if changed or behind or prefill.several_versions:
            self._interrupt(f"the weights of {worker.url} changed while it computed the prompt")

    def _interrupt(self, reason: str) -> None:
        self._history.interruptions += 1
        if self._history.interruptions > MAX_INTERRUPTIONS:
            raise UpstreamError(f"it is unknown which weights sampled the first token: {reason}")
        raise PairInterrupted(cut=False)


def _is_stream(reply: Reply) -> bool:
    return (first_header(reply.headers, b"content-type") or b"").startswith(EVENTS)
