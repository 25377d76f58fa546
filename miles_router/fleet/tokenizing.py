"""How one worker is asked what its tokenizer makes of a text."""

from __future__ import annotations

from typing import Protocol

from miles_router.fleet.workers import Worker


class TokenizerQuestion(Protocol):
    """The question: `control.probes.Probes`."""

    async def tokenize(self, worker: Worker, path: str, text: str, key: bytes | None) -> tuple[int, bytes]:
        """Return the status and body of a worker's answer at `path`, its route that tokenizes text, to this
        `Authorization` if the worker has no key of its own. No special tokens are asked for.

        Raises:
            UpstreamError: it does not answer.
        """
        ...
