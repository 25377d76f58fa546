"""One request to both halves of a prefill/decode pair, and the one answer that they make.

Nothing is given before the prefill half has handed its prompt over: until then the loss of either half is the loss of a
worker before its reply, and the request is sent again with another in its place. From then on the decode half answers
alone. Closing a half's connection is what makes its engine drop what the other half will never come for.
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
from miles_router.asgi.flight import Flight
from miles_router.asgi.headers import first_header
from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.engine import CannotServe
from miles_router.engines.events import Event
from miles_router.engines.known import USUAL
from miles_router.engines.names import Names
from miles_router.engines.pairs.held_rows import RowStrings
from miles_router.engines.pairs.joining import first_version, join_answer, join_event
from miles_router.engines.pairs.prefill import PrefillAnswer, has_error, reports_abort
from miles_router.engines.pairs.request import ROOM_BITS, PairedRequest
from miles_router.errors import UpstreamBroken, UpstreamInvalidResponse, UpstreamUnreachable
from miles_router.fleet.gate import endpoint
from miles_router.fleet.lease import Lease
from miles_router.fleet.workers import BOOTSTRAP_PORT, Worker
from miles_router.forwarding.outgoing import Outgoing, PairHistory, send
from miles_router.forwarding.reply import Reply
from miles_router.forwarding.translated import EVENTS, FAILED, OK, HeldReply, RewrittenStream
from miles_router.forwarding.upstream import Admit, NotAdmitted, Upstream

#: Seconds that one half has to say why the other one has failed.
PATIENCE = 10.0
#: How often one request is asked again since weights changed meanwhile.
MAX_INTERRUPTIONS = 8


class PairInterrupted(NotAdmitted):
    """Nothing of an answer was given, and none will be: it must be asked again. `cut`: a pause or an abort has ended it
    before its prompt was handed over; if not, weights have changed meanwhile."""

    def __init__(self, *, cut: bool) -> None:
        super().__init__()
        self.cut = cut


class PrefillLost(UpstreamUnreachable):
    """The prefill half was lost before it had handed the prompt over."""

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
    """The version that the prefill half has, and for each half a number that is another once its weights change."""

    version: str | None
    prefill: int
    decode: int


@dataclass(frozen=True)
class Halves:
    """The two that one request goes to."""

    prefill: Lease
    decode: Worker

    @property
    def place(self) -> tuple[str, int]:
        """Where they meet."""
        worker = self.prefill.worker
        assert worker.bootstrap_port is not None
        return worker.address.host, worker.bootstrap_port

    def weights(self) -> PairWeights:
        """What is known of theirs now."""
        worker = self.prefill.worker
        return PairWeights(worker.weight_version, worker.caches.number, self.decode.caches.number)

    def check(self) -> None:
        """Refuse workers that say themselves that they are something else: an answer of one token would look complete.

        Raises:
            CannotServe: naming it.
        """
        for worker in (self.prefill.worker, self.decode):
            said = worker.facts.half if worker.facts is not None else None
            if said is not None and said != worker.role.value:
                raise CannotServe(f"{worker.url} is registered as {worker.role.value}, and says that it is {said}")
            if worker.engine is not None and worker.engine.translates:
                raise CannotServe(f"{worker.url} is no half of a pair: its engine ({worker.engine.kind}) has none")
        if self.prefill.worker.bootstrap_port is None:
            raise CannotServe(f"{self.prefill.worker.url} has no {BOOTSTRAP_PORT}, at which it is met")


#: What one of a pair's requests comes to.
PairReply = Reply | HeldReply | RewrittenStream


class PairExchange:
    """One request to two halves.

    Args:
        history: of the request.
        paired: what both are asked.
        body: the same, with what belongs to this one sending.
        names: of its generations.
        admit: whether a byte of it may be written now.
        cut: whether a pause or an abort has ended what was sent before.
        limit: the bytes of an answer that are held.
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
        self._body = engine.with_room(body, *halves.place, random.getrandbits(ROOM_BITS))
        self._admit = admit
        self._cut = cut
        self._limit = limit
        self._weights = halves.weights()
        self._decoding: Reply | None = None

    async def open(self, flight: Flight | None) -> PairReply:
        """Send both, and wait until one answer is certain.

        Raises:
            PrefillLost, UpstreamUnreachable: the one half or the other was lost.
            UpstreamInvalidResponse: what one of them says cannot be read, or does not fit the other's.
            NotAdmitted: as `Upstream.open`, or it must be asked again.
        """
        loop = asyncio.get_running_loop()
        prefill = loop.create_task(self._prefill(flight), name="prefill half")
        decode = loop.create_task(self._decode(), name="decode half")
        try:
            await self._wait(prefill, decode)
            answer = prefill.result() if prefill.done() else None
            if isinstance(answer, PrefillAnswer) and decode.result().status == OK:
                reply = await self._answer(answer, decode.result())
            else:
                held = answer if isinstance(answer, HeldReply) else None
                reply = await self._refusal(held, decode.result() if decode.done() else None)
            if isinstance(reply, HeldReply):
                return reply
            self._decoding = None  # whoever gets it closes it
            return reply
        finally:
            for task in (prefill, decode):
                task.cancel()
            await asyncio.wait({prefill, decode})
            for task in (prefill, decode):
                if not task.cancelled():
                    task.exception()  # nobody else looks at what the other half came to
            if self._decoding is not None:
                self._decoding.close()

    async def _wait(self, prefill: asyncio.Task[PrefillAnswer | HeldReply], decode: asyncio.Task[Reply]) -> None:
        """Until both have what they need, or one decides it alone: the other might never end. One that has failed may
        have done so for what the other one says.

        Raises:
            The errors of either half.
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
            done, _ = await asyncio.wait(going, timeout=PATIENCE if failed else None, return_when=FIRST_COMPLETED)
            if not done:
                return

    async def _prefill(self, flight: Flight | None) -> PrefillAnswer | HeldReply:
        """What the prefill half says; its reply, where that is the answer: the decode half would wait for ever.

        Raises:
            PrefillLost, NotAdmitted, UpstreamInvalidResponse.
        """
        worker = self._halves.prefill.worker
        if flight is not None:
            flight.prefill_url = worker.url
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
            if flight is not None:
                flight.prefill_url = None
        if reply.status != OK:
            return self._held(reply, rows.with_own_rows(body))
        try:
            answer = PrefillAnswer.read(endpoint(self._request.path), body, rows, streamed=_is_stream(reply))
        except UnreadableAnswer as error:
            raise UpstreamInvalidResponse(f"the answer of {worker.url} cannot be read: {error}") from error
        if answer.outcome == "partly_aborted":
            raise PairInterrupted(cut=True)
        if answer.outcome == "handed_over":
            self._check_first_token(answer)
            return answer
        return self._held(reply, rows.with_own_rows(body), failed=answer.outcome == "failed")

    async def _decode(self) -> Reply:
        """The decode half's reply, whose head has come."""
        self._decoding = await send(
            self._upstream, self._halves.decode, self._request, body=self._body, admit=self._admit
        )
        return self._decoding

    async def _refusal(self, prefill: HeldReply | None, decode: Reply | None) -> PairReply:
        """What is said in place of an answer: that it was aborted or refused, or else why a half has failed.

        Raises:
            PairInterrupted: it has failed over a pause or an abort.
        """
        if prefill is not None and not prefill.failed:
            return prefill
        refusal, said = prefill, b"" if prefill is None else prefill.beginning
        if decode is not None and decode.status != OK:
            refusal = self._held(decode, [await decode.read_all(self._limit)])
            said += refusal.beginning
        elif decode is not None:
            with suppress(TimeoutError):  # a stream, or nothing
                said += await tasks.within(PATIENCE, decode.begun(), name="decode half's reason")
        if self._cut() or reports_abort(said):
            raise PairInterrupted(cut=True)
        assert refusal is not None
        return refusal

    async def _answer(self, prefill: PrefillAnswer, reply: Reply) -> PairReply:
        """The decode half's answer, with what the prefill half knows. Raises as `open`."""
        try:
            if _is_stream(reply):
                return await self._stream(prefill, reply)
            body, rows = await self._read(reply)
        except UpstreamBroken as error:  # nothing of it was given
            raise UpstreamUnreachable(str(error)) from error
        changed = self._halves.weights().decode != self._weights.decode
        try:
            whole = join_answer(body, rows, prefill, self._paired, changed=changed)
        except UnreadableAnswer as error:
            raise UpstreamInvalidResponse(f"the answers of a pair do not fit together: {error}") from error
        return self._held(reply, whole)

    async def _read(self, reply: Reply) -> tuple[bytes, RowStrings]:
        """The rest of a reply, without its rows, and these.

        Raises:
            UpstreamBroken: the connection was lost within it.
            UpstreamInvalidResponse: it is longer than may be held.
        """
        rows, remains, size = RowStrings(self._paired.rows), [], 0
        while chunk := await reply.read():
            remains.append(rows.feed(chunk))
            size += len(chunk)
            if size > self._limit:
                raise UpstreamInvalidResponse(f"the reply is longer than {self._limit} bytes")
        return b"".join((*remains, rows.end())), rows

    def _held(self, reply: Reply, pieces: Sequence[bytes], *, failed: bool = False) -> HeldReply:
        """With its client's names."""
        named = [self._names.outward(piece) for piece in pieces] if self._names else pieces
        return HeldReply(reply.status, reply.headers, named, failed=failed)

    async def _stream(self, prefill: PrefillAnswer, reply: Reply) -> PairReply:
        """A stream whose first token has come. Its events cannot say that another engine has sampled that."""
        first_bytes = await reply.begun()
        if has_error(first_bytes) and (self._cut() or reports_abort(first_bytes)):
            raise PairInterrupted(cut=True)
        said = first_version(first_bytes) or self._halves.decode.weight_version
        if None not in (prefill.version, said) and prefill.version != said:
            self._ask_again(f"{self._halves.decode.url} has other weights ({said}) than {prefill.version}")
        if not (self._paired.rows or self._paired.prompt_logprobs or self._names):
            return reply
        rows = RowStrings(self._paired.rows)
        theirs = prefill.metas() if self._paired.rows or self._paired.prompt_logprobs else {}

        def rewrite(event: Event) -> bytes:
            joined = join_event(event, rows, prefill, theirs, self._paired) if theirs else None
            written, *others = joined or [event.raw]
            return b"".join((self._names.outward(written), *others))

        return RewrittenStream(reply, rewrite, self._limit, rows)

    def _check_first_token(self, prefill: PrefillAnswer) -> None:
        """A prefill half names the weights that it has once the prompt was handed over: where these have changed,
        nobody knows which sampled."""
        worker = self._halves.prefill.worker
        before = self._history.versions.get(worker, self._weights.version)
        if prefill.version is not None:
            self._history.versions[worker] = prefill.version
        changed = self._halves.weights().prefill != self._weights.prefill
        behind = None not in (before, prefill.version) and before != prefill.version
        if changed or behind or prefill.several_versions:
            self._ask_again(f"the weights of {worker.url} change all the time")

    def _ask_again(self, reason: str) -> None:
        self._history.interrupted += 1
        if self._history.interrupted > MAX_INTERRUPTIONS:
            raise UpstreamInvalidResponse(f"which weights have sampled cannot be told: {reason}")
        raise PairInterrupted(cut=False)


def _is_stream(reply: Reply) -> bool:
    return (first_header(reply.headers, b"content-type") or b"").startswith(EVENTS)
