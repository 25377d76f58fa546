"""The routing state of one request: its worker, the start of its reply, whether it was aborted. No I/O."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from miles_router.errors import RouterError

if TYPE_CHECKING:
    from miles_router.asgi.headers import RawHeaders
    from miles_router.fleet.evaluation import Evaluation
    from miles_router.fleet.workers import Worker
    from miles_router.partial_rollouts.moves.moved import Relocation

_count = itertools.count(1)


class UsedCache(NamedTuple):
    """A prefix cache that an engine used for sampling.

    `versions` returns the weight versions that may have filled it so far, oldest first; None stands for weights of
    unknown version.
    """

    number: int
    versions: Callable[[], Sequence[str | None]]


class Mark(NamedTuple):
    """A moment of a request.

    Attributes:
        at: `time.perf_counter()`.
        request: the `Routing.number` of the attempt, which differs between generations that run side by side.
    """

    name: str
    at: float
    request: int
    facts: Mapping[str, Any]


class Routing:
    """The routing and abort state of one request. The proxy writes it; an abort marks it."""

    __slots__ = (
        *(
            "aborted",
            "excluded_workers",
            "caches",
            "first_byte_at",
            "continued_cache",
            "evaluation",
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
        #: Arrival order: lower for an earlier request.
        self.number = next(_count)
        #: The requested model, if it was not the name of an adapter when the request arrived.
        self.model: str | None = None
        #: The worker that answered, or the last worker that was tried.
        self.worker_url: str | None = None
        #: The prefill worker of a prefill/decode pair, while it computes the prompt.
        self.prefill_url: str | None = None
        #: The rank on `worker_url`; None if the router does not choose ranks there.
        self.rank: int | None = None
        #: The URL of the worker to use next, as long as it is routable.
        self.preferred: str | None = None
        #: Returns the workers that must not get the request; called at each choice of a worker. None: all may.
        self.excluded_workers: Callable[[], Collection[Worker]] | None = None
        #: True if another worker can continue the generation: `/generate` without a session key or a cache to keep.
        self.movable = False
        #: The move to another worker that is in progress.
        self.move: Relocation | None = None
        #: `time.perf_counter()` at the head of the worker's reply.
        self.first_byte_at: float | None = None
        #: The one weight version that may sample the request; None if it is not part of an evaluation.
        self.evaluation: Evaluation | None = None
        #: The number of the prefix cache to use, because the request continues tokens that were sampled with it.
        self.continued_cache: int | None = None
        #: The prefix caches that its attempts were sampled with, in order.
        self.caches: list[UsedCache] = []
        #: How many of its generations wait now, at the gate or for admission.
        self.waits = 0
        #: Seconds in which at least one of its generations has waited, in total.
        self.waited = 0.0
        #: True after a client asked to abort it: the router must not resume the generation.
        self.aborted = False
        #: The value of `X-Group-Id`: requests of one group can be aborted together.
        self.group: bytes | None = None
        #: Breaks the request off with an error; set while the request is at a worker.
        self.stop: Callable[[RouterError], None] | None = None
        #: Ids that workers gave its generations (SGLang's `meta_info.id`), as far as a layer has read them.
        self.rids: set[str] = set()
        #: Outer name (`rid`) of a generation -> the name used for it one step closer to the engine. Outer names are the
        #: client's, or the name of one attempt.
        self.inward: dict[str, str] = {}
        #: True if the client's generation names are private to it, so that engines get other names.
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
        """The URLs of the workers that process the request."""
        return {url for url in (self.worker_url, self.prefill_url) if url is not None}

    def names_inward(self, name: str) -> Iterator[str]:
        """Yield the inner names of the generation that the client calls `name`. Outdated names may be among them."""
        while name in self.inward:
            name = self.inward[name]
            yield name

    @property
    def cache(self) -> int | None:
        """The number of the prefix cache used last; a request that continues these tokens uses the same one."""
        return self.caches[-1].number if self.caches else None

    @property
    def cache_versions(self) -> list[str | None]:
        """The weight versions that may have computed the cached prefixes that engines used, without repeats."""
        return list(dict.fromkeys(version for used in self.caches for version in used.versions()))
