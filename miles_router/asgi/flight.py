"""Where a request is on its way to a worker: who has it, when its reply began, whether it was aborted. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from miles_router.errors import RouterError

if TYPE_CHECKING:
    from miles_router.asgi.exchange import Message, Receive, Scope, Send
    from miles_router.asgi.headers import RawHeaders
    from miles_router.fleet.workers import Worker

_count = itertools.count(1)


class UsedCache(NamedTuple):
    """A prefix cache that an engine sampled with: its number, and what tells the weight versions that may have filled
    it by now, oldest first (None: nobody has named those weights)."""

    number: int
    versions: Callable[[], Sequence[str | None]]


class Relief(Protocol):
    """Who takes a reply in place of the client, and answers the client once the reply is over."""

    async def take(self, message: Message) -> None:
        """One ASGI message of the reply."""
        ...

    async def finish(self) -> None:
        """The reply is over, or was broken off, and its worker is free of it."""
        ...


class Move(Protocol):
    """Another worker is to take a request over: the one that has it was told to give back what it has sampled."""

    def relief(self, scope: Scope, receive: Receive, send: Send) -> Relief | None:
        """Who takes the reply; None where somebody who sees it knows what to do."""
        ...


class Mark(NamedTuple):
    """A moment of a request.

    Attributes:
        at: `time.perf_counter()`.
        request: the `Flight.number` of the attempt, which differs between generations that run side by side.
    """

    name: str
    at: float
    request: int
    facts: Mapping[str, Any]


class Flight:
    """One request's routing and abort facts. The innermost app writes them; an abort marks them."""

    __slots__ = (
        *(
            "aborted",
            "barred",
            "caches",
            "first_byte_at",
            "goes_on",
            "group",
            "inward",
            "marks",
            "model",
            "movable",
            "move",
            "number",
        ),
        *("preferred", "prefill_url", "private", "rank", "rids", "stop", "waited", "waits", "worker_headers"),
        "worker_url",
    )

    def __init__(self) -> None:
        #: Lower for a request that came before.
        self.number = next(_count)
        #: The model that it names, where that was no adapter's name when it came.
        self.model: str | None = None
        #: The worker that answered, or that was tried last.
        self.worker_url: str | None = None
        #: The worker that computes its prompt for that one, while it does.
        self.prefill_url: str | None = None
        #: The rank of that one; None where it is not counted on ranks.
        self.rank: int | None = None
        #: The worker that takes it next, while that one takes requests.
        self.preferred: str | None = None
        #: Tells the workers that must not take it, at each choice of one; None where all may.
        self.barred: Callable[[], Collection[Worker]] | None = None
        #: Whether nothing but its body may tie it to its worker.
        self.movable = False
        #: What is under way to have another worker take it over.
        self.move: Move | None = None
        #: `time.perf_counter()` at the head of the worker's reply.
        self.first_byte_at: float | None = None
        #: The number of the prefix cache that it keeps, for it goes on from tokens that were sampled with that one.
        self.goes_on: int | None = None
        #: The prefix caches that its parts were sampled with, one after the other.
        self.caches: list[UsedCache] = []
        #: How many generations of it wait now, at the gate or for room,
        self.waits = 0
        #: and for how many seconds some have waited until now, together.
        self.waited = 0.0
        #: A client asked to abort it: it must not be carried on.
        self.aborted = False
        #: What it is aborted with, together with others.
        self.group: bytes | None = None
        #: Breaks it off with an error, while a worker has it.
        self.stop: Callable[[RouterError], None] | None = None
        #: Ids that workers gave its generations (SGLang's `meta_info.id`), where a layer has read them.
        self.rids: set[str] = set()
        #: What generations are called further in, by the name they have further out: the client's, or that of a leg.
        self.inward: dict[str, str] = {}
        #: Whether its client shares no names with others: engines call its generations otherwise than it does.
        self.private = False
        #: The moments of the request, kept where a middleware has put a list here.
        self.marks: list[Mark] | None = None
        #: Returns the headers for the worker in place of those given, with the key that ties the request to earlier
        #: ones; called for each attempt to generate.
        self.worker_headers: Callable[[RawHeaders, str | None], RawHeaders] | None = None

    def mark(self, name: str, worker: Worker | None = None, **facts: object) -> None:
        """Keep this moment where a middleware wants the request's."""
        if self.marks is not None:
            if worker is not None:
                facts.update(worker=worker.url, weight_version=worker.weight_version)
            self.marks.append(Mark(name, perf_counter(), self.number, facts))

    @property
    def urls(self) -> set[str]:
        """The workers that have it."""
        return {url for url in (self.worker_url, self.prefill_url) if url is not None}

    def names_inward(self, name: str) -> Iterator[str]:
        """The names further in of the generation that has this name with its client; one of them may be old."""
        while name in self.inward:
            name = self.inward[name]
            yield name

    @property
    def cache(self) -> int | None:
        """The number of the prefix cache that it was sampled with last, which what goes on from it keeps."""
        return self.caches[-1].number if self.caches else None

    @property
    def cache_versions(self) -> list[str | None]:
        """The weight versions that may have filled what engines found for it in prefix caches."""
        return list(dict.fromkeys(version for used in self.caches for version in used.versions()))
