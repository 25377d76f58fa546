"""Where a request is on its way to a worker: who has it, when its reply began, whether it was aborted. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

_count = itertools.count(1)


class Flight:
    """One request's routing and abort facts. The innermost app writes them; an abort marks them."""

    __slots__ = ("aborted", "first_byte_at", "inward", "number", "rids", "worker_url")

    def __init__(self) -> None:
        #: Lower for a request that came before.
        self.number = next(_count)
        #: The worker that answered, or that was tried last.
        self.worker_url: str | None = None
        #: `time.perf_counter()` at the head of the worker's reply.
        self.first_byte_at: float | None = None
        #: A client asked to abort it: it must not be carried on.
        self.aborted = False
        #: Ids that workers gave its generations (SGLang's `meta_info.id`), where a layer has read them.
        self.rids: set[str] = set()
        #: What its worker calls generations for which their client has another name, by that.
        self.inward: Mapping[str, str] = {}
