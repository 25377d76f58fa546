"""One half of a prefill/decode pair: the two meet in a room, and the prompt's keys and values go from one to the other.

As SGLang 0.5.23 does (`disaggregation/prefill.py`, `decode.py`, each seen on a running pair): the prefill half samples
the first token, hands it over and ends with it; the decode half answers once it has it. One half alone waits. A half
that is aborted tells the other only if it is the decode half. A room is met in once, so that samples of one prompt
(`n` > 1), which share one, wait for ever.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from miles_router.testing.worker.engine import Engine
from miles_router.testing.worker.model.generation import Generation, GenerationRequest

Mode = Literal["prefill", "decode"]
NO_ROOM = "Invalid request: Disaggregated request received without bootstrap room id. req.rid={rid!r}"
ABORT, DONE = b"abort\n", b"done\n"
FAILED = 500
_AGAIN_S = 0.05


@dataclass(frozen=True, slots=True)
class Room:
    """Where the halves of one sample meet."""

    host: str
    port: int
    number: int


@dataclass(slots=True)
class _Meeting:
    """What a prefill half knows of a room."""

    decode: asyncio.StreamWriter | None = None
    taken: bool = False
    said: bytes = b""
    """By the decode half, once it has what it came for, or was aborted."""


@dataclass
class Pairing:
    """What makes a worker one half. `port` is where a prefill half is met; 0 takes a free one. `patience_s` is how long
    a decode half waits for a prefill half that does not listen, or is gone."""

    mode: Mode
    port: int = 0
    patience_s: float = 14.0
    host: str = "127.0.0.1"
    _meetings: dict[int, _Meeting] = field(default_factory=dict)
    _server: asyncio.Server | None = None
    _engine: Engine | None = None
    _open: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def registration(self) -> dict[str, str]:
        """What a router is told of it, beside its address."""
        own = {"bootstrap_port": str(self.port)} if self.mode == "prefill" else {}
        return {"worker_type": self.mode, **own}

    async def start(self, engine: Engine) -> None:
        """Listen, if this is a prefill half."""
        self._engine = engine
        if self.mode == "prefill" and self._server is None:
            self._server = await asyncio.start_server(self._meet, self.host, self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """End as a process does: nobody is told why."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for writer in tuple(self._open):
            writer.transport.abort()
        self._meetings.clear()

    def assign(
        self, engine: Engine, body: Mapping[str, Any], samples: Sequence[GenerationRequest], copies: int
    ) -> None:
        """Give each sample its room: consecutive ones to the prompts of a list; ValueError without any. The decode half
        knows a prefill half's rank by the room."""
        room = body.get("bootstrap_room")
        if room is None:
            raise ValueError(NO_ROOM.format(rid=samples[0].rid))
        for index, sample in enumerate(samples):
            prompt = index // copies
            number: int = room[prompt] if isinstance(room, list) else room + prompt
            sample.room = Room(
                str(_for_prompt(body, "bootstrap_host", prompt)),
                int(_for_prompt(body, "bootstrap_port", prompt) or 0),
                number,
            )
            if self.mode == "prefill" and engine.dp_size > 1:
                sample.routed_dp_rank = number % engine.dp_size

    def outputs(self, engine: Engine, generation: Generation) -> AsyncIterator[None]:
        """As `Engine.outputs`."""
        return self._prefill(engine, generation) if self.mode == "prefill" else self._decode(engine, generation)

    # Prefill

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A decode half has come, and names its room; later it says how that went."""
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

    async def _prefill(self, engine: Engine, generation: Generation) -> AsyncIterator[None]:
        room = generation.request.room
        assert room is not None
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

    async def _send(self, engine: Engine, generation: Generation, meeting: _Meeting) -> None:
        """The transfer: it ends when the decode half says so, or this generation is aborted."""
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

    async def _decode(self, engine: Engine, generation: Generation) -> AsyncIterator[None]:
        handed = await self._handed(engine, generation)
        if handed is not None:
            await engine.until(lambda: engine.generates() or generation.ending)
            generation.cached_tokens = handed["cached_tokens"]
            generation.adopt(handed["token"], engine.weight_version)
            if (generation.request.stream or generation.finish_reason is not None) and generation.flush():
                yield
        elif generation.finish_reason is not None:
            yield
        async for _ in engine.outputs(generation):
            yield

    async def _handed(self, engine: Engine, generation: Generation) -> dict[str, Any] | None:
        """What the prefill half gives; None where it does not, and the generation has failed."""
        room = generation.request.room
        assert room is not None
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
        """Tell the prefill half, which may not have been met yet."""
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
