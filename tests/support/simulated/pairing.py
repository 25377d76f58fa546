"""One half of a simulated prefill/decode pair. The halves find each other by a bootstrap room; the prefill half then
transfers its result (really the prompt's KV cache) to the decode half.

It behaves as SGLang 0.5.23 does (`disaggregation/prefill.py`, `decode.py`, observed on a running pair). The prefill
half samples the first token, transfers it and finishes; the decode half answers once it has the token. A half without
its partner waits. An aborted decode half notifies the prefill half; an aborted prefill half notifies nothing. A room
works only once, so samples of one prompt (`n` > 1), which share a room, wait forever.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from miles_router.testing.worker.engine import Engine
from miles_router.testing.worker.model.generation import ABORTED, Generation, GenerationRequest
from tests.support.simulated.extended import extended

Mode = Literal["prefill", "decode"]
NO_ROOM = "Invalid request: Disaggregated request received without bootstrap room id. req.rid={rid!r}"
NO_MASKS = (
    "return_sampling_mask requires SGLANG_ENABLE_DISAGG_SAMPLING_MASK=1 on both prefill and decode servers when using "
    "disaggregated serving."
)
ABORT, DONE = b"abort\n", b"done\n"
INVALID, FAILED = 400, 500
_AGAIN_S = 0.05


@dataclass(frozen=True, slots=True)
class Room:
    """The bootstrap room of one sample: the prefill half's address and a number."""

    host: str
    port: int
    number: int


@dataclass(slots=True, kw_only=True)
class HalfRequest(GenerationRequest):
    """A request to one half."""

    room: Room


class HalfGeneration(Generation):
    """A generation on one half."""

    recomputed = 0
    """The number of output tokens at the last retraction."""

    @property
    def room(self) -> Room:
        assert isinstance(self.request, HalfRequest)
        return self.request.room

    @property
    def ending(self) -> bool:
        """True if it has ended or is aborted."""
        return self.finish_reason is not None or self._to_finish is not None

    def hand_over(self, version: str) -> None:
        """Sample the one id that a prefill half samples, without checking for an end."""
        self._append(self._choose(), version)

    def adopt(self, token: int, version: str) -> None:
        """Continue from the id that a prefill half sampled. It is recorded under this version, whatever its weights."""
        self._choose()
        self._append(token, version)
        self._check_finish(token)

    def end_early(self) -> None:
        """End now with the output so far, as aborted unless it has a finish reason."""
        self.finish_reason = self.finish_reason or dict(self._to_finish or ABORTED)

    def fail(self, message: str, status: int) -> None:
        self.finish_reason = {"type": "abort", "message": message, "status_code": status, "err_type": None}


@dataclass(slots=True)
class _Meeting:
    """The prefill half's state of one room."""

    decode: asyncio.StreamWriter | None = None
    taken: bool = False
    said: bytes = b""
    """The decode half's message: `DONE` once it has the token, or `ABORT`."""


@dataclass
class Pairing:
    """The settings and state that make a worker one half of a pair.

    `port` is the bootstrap port of a prefill half; 0 takes a free one. `patience_s` is how long a decode half waits for
    a prefill half that does not listen or is gone. `masks`: it was started with `SGLANG_ENABLE_DISAGG_SAMPLING_MASK=1`,
    so that the first token's sampling mask is transferred too; without that, it refuses requests for masks.
    """

    mode: Mode
    port: int = 0
    patience_s: float = 14.0
    host: str = "127.0.0.1"
    masks: bool = False
    _meetings: dict[int, _Meeting] = field(default_factory=dict)
    _server: asyncio.Server | None = None
    _engine: Engine | None = None
    _open: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def registration(self) -> dict[str, str]:
        """The parameters of the registration at a router, besides the worker's URL."""
        own = {"bootstrap_port": str(self.port)} if self.mode == "prefill" else {}
        return {"worker_type": self.mode, **own}

    async def start(self, engine: Engine) -> None:
        """Listen on the bootstrap port, if this is a prefill half."""
        self._engine = engine
        if self.mode == "prefill" and self._server is None:
            self._server = await asyncio.start_server(self._meet, self.host, self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop as a process that exits: connections are aborted without a message."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for writer in tuple(self._open):
            writer.transport.abort()
        self._meetings.clear()

    def assign(
        self, engine: Engine, body: Mapping[str, Any], samples: Sequence[GenerationRequest], copies: int
    ) -> list[GenerationRequest]:
        """Return each sample with its room; a list of prompts gets consecutive rooms. With several ranks, a prefill
        half's room number also determines the rank, so that the decode half can find it.

        Raises:
            ValueError: the request has no bootstrap room.
        """
        room = body.get("bootstrap_room")
        if room is None:
            raise ValueError(NO_ROOM.format(rid=samples[0].rid))
        made: list[GenerationRequest] = []
        for index, sample in enumerate(samples):
            prompt = index // copies
            number: int = room[prompt] if isinstance(room, list) else room + prompt
            host, port = (_for_prompt(body, name, prompt) for name in ("bootstrap_host", "bootstrap_port"))
            if self.mode == "prefill" and engine.dp_size > 1:
                sample.routed_dp_rank = number % engine.dp_size
            made.append(extended(sample, HalfRequest, room=Room(str(host), int(port or 0), number)))
        return made

    # Prefill

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a decode half's connection: read its room number, and later its final message."""
        self._open.add(writer)
        meeting = None
        try:
            number = await reader.readline()
            if number:
                meeting = self._meetings.setdefault(int(number), _Meeting())
                meeting.decode = writer
                self._pulse()
                meeting.said = await reader.readline() or meeting.said
        except ConnectionError:
            pass
        finally:
            self._pulse()
            self._open.discard(writer)
            writer.close()

    def _pulse(self) -> None:
        if self._engine is not None:
            self._engine.pulse()

    async def prefill(self, engine: Engine, generation: HalfGeneration) -> AsyncIterator[None]:
        """Run a generation on a prefill half; yield at its end."""
        room = generation.room
        meeting = self._meetings.setdefault(room.number, _Meeting())
        alone, meeting.taken = meeting.taken, True
        try:
            await engine.until(lambda: generation.ending or (meeting.decode is not None and not alone))
            if not generation.ending:
                await asyncio.sleep(engine.token_latency_s + engine.slow_down_s)
                await engine.thaw(generation)
            if not generation.ending:
                generation.hand_over(engine.weight_version)
                await self._send(engine, generation, meeting)
        finally:
            if not alone:
                self._meetings.pop(room.number, None)
        generation.end_early()
        generation.flush()
        yield

    async def _send(self, engine: Engine, generation: HalfGeneration, meeting: _Meeting) -> None:
        """Transfer the first token. Wait until the decode half confirms or aborts, or this generation is aborted."""
        assert meeting.decode is not None
        handed = {"token": generation.output_ids[0], "cached_tokens": generation.cached_tokens}
        if not meeting.decode.transport.is_closing():
            meeting.decode.write(json.dumps(handed).encode() + b"\n")
        await engine.until(lambda: generation.ending or meeting.said)
        if meeting.said == ABORT:
            generation.fail(f"Prefill transfer failed for request rank=0 req.rid={generation.request.rid!r}", FAILED)
        elif meeting.said == DONE:
            generation.finish_reason = {"type": "length", "length": 0}

    # Decode

    async def begin_decode(self, engine: Engine, generation: HalfGeneration) -> AsyncIterator[None]:
        """Take a generation over from the prefill half, and yield its first token if it is to be sent."""
        handed = await self._handed(engine, generation)
        if handed is not None:
            await engine.until(lambda: engine.generates() or generation.ending)
            generation.cached_tokens = handed["cached_tokens"]
            generation.adopt(handed["token"], engine.weight_version)
            if (generation.request.stream or generation.finish_reason is not None) and generation.flush():
                yield
        elif generation.finish_reason is not None:
            yield

    async def _handed(self, engine: Engine, generation: HalfGeneration) -> dict[str, Any] | None:
        """Return what the prefill half transfers. Return None if the transfer fails, and fail the generation."""
        room = generation.room
        coming = asyncio.ensure_future(self._fetched(room))
        aborted = asyncio.ensure_future(engine.until(lambda: generation.ending))
        try:
            await asyncio.wait({coming, aborted}, return_when=asyncio.FIRST_COMPLETED)
            handed = coming.result() if coming.done() else None
        finally:
            for task in (coming, aborted):
                task.cancel()
            await asyncio.wait({coming, aborted})
        if handed is None:
            if generation.ending:
                await self._say_aborted(room)
            why = "Aborted by AbortReq." if generation.ending else "the prefill half is gone"
            generation.fail(
                f"Decode transfer failed for request rank=0 req.rid={generation.request.rid!r}: {why}", FAILED
            )
        return handed

    async def _say_aborted(self, room: Room) -> None:
        """Notify the prefill half on a new connection, since there may be none yet."""
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(room.host, room.port)
            writer.write(f"{room.number}\n".encode() + ABORT)
            writer.close()

    async def _fetched(self, room: Room) -> dict[str, Any] | None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self.patience_s
        while loop.time() < until:
            try:
                reader, writer = await asyncio.open_connection(room.host, room.port)
            except OSError:
                await asyncio.sleep(_AGAIN_S)
                continue
            return await self._visit(reader, writer, room, until)
        return None

    async def _visit(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, room: Room, until: float
    ) -> dict[str, Any] | None:
        self._open.add(writer)
        word = ABORT
        try:
            writer.write(f"{room.number}\n".encode())
            line = await reader.readline()
            if line:
                word = DONE
                handed: dict[str, Any] = json.loads(line)
                return handed
        except ConnectionError:
            pass
        finally:
            self._open.discard(writer)
            if not writer.transport.is_closing():
                writer.write(word)
            writer.close()
        await asyncio.sleep(max(0.0, until - asyncio.get_running_loop().time()))
        return None


def _for_prompt(body: Mapping[str, Any], name: str, prompt: int) -> Any:
    value = body.get(name)
    return value[prompt] if isinstance(value, list) else value
