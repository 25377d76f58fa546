"""What came to a worker's door: a bounded record of every exchange, for tests to look at."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from miles_router.testing.worker.model.generation import Generation, VersionSpan


@dataclass(slots=True)
class GenerationRecord:
    """One sample as the engine knows it: the truth that clients' arrays are compared with."""

    rid: str
    input_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    weight_versions: list[VersionSpan] = field(default_factory=list)
    text: str = ""
    dp_rank: int | None = None
    lora_path: str | None = None
    finish_reason: dict[str, Any] | None = None
    """SGLang's `finish_reason`; None when the generation did not end by itself."""
    ended: Generation | None = None

    @property
    def logprobs(self) -> list[float]:
        """One for each output id, computed when it is asked for."""
        return self.ended.logprobs if self.ended else []

    def update(self, generation: Generation) -> None:
        self.output_ids = generation.output_ids
        self.ended = generation
        self.weight_versions = generation.spans
        self.text = generation.text
        self.finish_reason = generation.finish_reason


@dataclass(slots=True)
class Exchange:
    """One request and what became of it."""

    method: str
    target: str
    """Raw path and query, as they came."""
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes = b""
    generations: list[GenerationRecord] = field(default_factory=list)
    status: int | None = None
    """Status that was sent; None while none was."""
    fault: str | None = None
    """Name of the fault that was played on it."""
    disconnected: bool = False
    """The client left before the end."""
    done: bool = False

    @property
    def path(self) -> str:
        """The raw path without the query."""
        return self.target.partition("?")[0]

    @property
    def generation(self) -> GenerationRecord:
        """The only generation; ValueError when there were none or several."""
        (only,) = self.generations
        return only

    @property
    def rid(self) -> str:
        return self.generation.rid

    def json(self) -> Any:
        """The body parsed."""
        return orjson.loads(self.body)

    def header(self, name: str) -> str | None:
        """The first value of a header, names compared without case."""
        wanted = name.lower().encode()
        return next((value.decode("latin-1") for key, value in self.headers if key.lower() == wanted), None)


class Door:
    """The last exchanges of one worker, oldest first; iterable."""

    def __init__(self, limit: int = 10_000) -> None:
        self._exchanges: deque[Exchange] = deque(maxlen=limit)
        self._changed = asyncio.Event()

    def __iter__(self) -> Iterator[Exchange]:
        return iter(list(self._exchanges))

    def __len__(self) -> int:
        return len(self._exchanges)

    @property
    def last(self) -> Exchange:
        """The exchange that began last; IndexError when there was none."""
        return self._exchanges[-1]

    def at(self, path: str) -> list[Exchange]:
        """Exchanges on one raw path."""
        return [exchange for exchange in self._exchanges if exchange.path == path]

    @property
    def generations(self) -> list[GenerationRecord]:
        """Every sample of every exchange."""
        return [record for exchange in self._exchanges for record in exchange.generations]

    def generation(self, rid: str) -> GenerationRecord:
        """The latest sample with this rid; KeyError when there is none."""
        for record in reversed(self.generations):
            if record.rid == rid:
                return record
        raise KeyError(rid)

    def clear(self) -> None:
        self._exchanges.clear()

    async def wait_for(self, condition: Callable[["Door"], Any], timeout_s: float = 10.0) -> None:
        """Return once `condition(door)` holds; TimeoutError after `timeout_s`. Event-driven, not polled."""

        async def until() -> None:
            while not condition(self):
                await self._changed.wait()

        await asyncio.wait_for(until(), timeout_s)

    def open(self, exchange: Exchange) -> None:
        """Record an exchange that begins."""
        self._exchanges.append(exchange)
        self.notify()

    def notify(self) -> None:
        """Tell waiters that a record changed."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
