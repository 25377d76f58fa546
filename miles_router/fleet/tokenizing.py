"""The interface to a worker's tokenizer."""

from __future__ import annotations

from typing import Protocol

from miles_router.fleet.workers import Worker


class TokenizerQuestion(Protocol):
    """A client of the workers' tokenize route; `control.probes.Probes` implements it."""

    async def tokenize(self, worker: Worker, path: str, text: str, key: bytes | None) -> tuple[int, bytes]:
        """Tokenize `text` without special tokens and return the HTTP status and body of the worker's reply.

        Args:
            path: the worker's route that tokenizes text.
            key: the `Authorization` header to send if the worker was registered without a key.

        Raises:
            UpstreamError: the worker does not answer.
        """
        ...
