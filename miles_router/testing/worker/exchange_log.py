"""A bounded record of the requests that a simulated worker received, for tests to inspect."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from miles_router.testing.worker.model.generation import Generation, VersionSpan


@dataclass(slots=True)
class GenerationRecord:
    """One generated sample as the engine knows it. Tests compare clients' arrays with it."""

    rid: str
    input_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    weight_versions: list[VersionSpan] = field(default_factory=list)
    text: str = ""
    dp_rank: int | None = None
    lora_path: str | None = None
    finish_reason: dict[str, Any] | None = None
    """SGLang's `finish_reason`; None if the generation did not finish."""
    ended: Generation | None = None

    @property
    def logprobs(self) -> list[float]:
        """The logprob of each output id; computed on access."""
        return self.ended.logprobs if self.ended else []

    def update(self, generation: Generation) -> None:
        self.output_ids = generation.output_ids
        self.ended = generation
        self.weight_versions = generation.spans
        self.text = generation.text
        self.finish_reason = generation.finish_reason


@dataclass(slots=True)
class Exchange:
    """One request and its outcome."""

    method: str
    target: str
    """Raw path and query, as received."""
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes = b""
    generations: list[GenerationRecord] = field(default_factory=list)
    status: int | None = None
    """Status of the reply; None until it is sent."""
    fault: str | None = None
    """Name of the fault that was applied to this request."""
    disconnected: bool = False
    """The client disconnected before the end of the reply."""
    done: bool = False

    @property
    def path(self) -> str:
        """The raw path without the query."""
        return self.target.partition("?")[0]

    @property
    def generation(self) -> GenerationRecord:
        """The only generation of this request.

        Raises:
            ValueError: the request had no generation or several.
        """
        (only,) = self.generations
        return only

    @property
    def rid(self) -> str:
        return self.generation.rid

    def json(self) -> Any:
        return orjson.loads(self.body)

    def header(self, name: str) -> str | None:
        """Return the first value of a header, or None. The name is case-insensitive."""
        wanted = name.lower().encode()
        return next((value.decode("latin-1") for key, value in self.headers if key.lower() == wanted), None)


class ExchangeLog:
    """The most recent exchanges of one worker, at most `limit`. Iterating yields them, oldest first."""

    def __init__(self, limit: int = 10_000) -> None:
        self._exchanges: deque[Exchange] = deque(maxlen=limit)
        self._changed = asyncio.Event()

    def __iter__(self) -> Iterator[Exchange]:
        return iter(list(self._exchanges))

    def __len__(self) -> int:
        return len(self._exchanges)

    @property
    def last(self) -> Exchange:
        """The exchange that began last.

        Raises:
            IndexError: no exchange has begun.
        """
        return self._exchanges[-1]

    def at(self, path: str) -> list[Exchange]:
        """Return the exchanges with this raw path."""
        return [exchange for exchange in self._exchanges if exchange.path == path]

    @property
    def generations(self) -> list[GenerationRecord]:
        """All samples of all exchanges, in order."""
        return [record for exchange in self._exchanges for record in exchange.generations]

    def generation(self, rid: str) -> GenerationRecord:
        """Return the latest sample with this rid.

        Raises:
            KeyError: no sample has this rid.
        """
        for record in reversed(self.generations):
            if record.rid == rid:
                return record
        raise KeyError(rid)

    def clear(self) -> None:
        self._exchanges.clear()

    async def wait_for(self, condition: Callable[["ExchangeLog"], Any], timeout_s: float = 10.0) -> None:
        """Wait until `condition(log)` is true. It is evaluated when a record changes, not polled.

        Raises:
            TimeoutError: it was not true within `timeout_s` seconds.
        """

        async def until() -> None:
            while not condition(self):
                await self._changed.wait()

        await asyncio.wait_for(until(), timeout_s)

    def open(self, exchange: Exchange) -> None:
        """Record a new exchange."""
        self._exchanges.append(exchange)
        self.notify()

    def notify(self) -> None:
        """Wake the waiters, because a record has changed."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
