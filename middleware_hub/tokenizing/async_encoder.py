"""A `TextEncoder` for the event loop. The length of a text decides where it is encoded:

    at once            a few milliseconds at most
    in a thread        tokenizers release the interpreter's lock there; the rest takes a few milliseconds
    in a process       longer work, which would hold the lock for long, such as reading a million ids out of a
                       tokenizer. It ends when the request that waits for it is cancelled.

Further work queues for a free thread or process. Work that is cancelled while it queues never starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

from middleware_hub.tokenizing.alignment import Alignment
from middleware_hub.tokenizing.encoder_process import EncoderProcess, EncoderWork, PackedTokenizer
from middleware_hub.tokenizing.encoding import Encoding, TextEncoder
from miles_router.engines.spelling import Spelling
from miles_router.errors import BodyTooLarge, RouterError, Unavailable
from miles_router.middlewares import Router, Statistics, counter, gauge
from miles_router.trajectory.pieces import Tokens

#: The longest work done at once, and in a thread, in characters or ids.
AT_ONCE, IN_A_THREAD = 4096, 1 << 18
#: A process that encoded a longer text is ended, because it would keep the memory.
LARGE = 1 << 21
THREADS, PROCESSES = 4, 2
NAME = "encoding"


class TextTooLong(BodyTooLarge):
    """A text has more characters or ids than `--max-text-chars` allows."""


class EncodingStatistics(Statistics, prefix="miles_router_encoding"):
    """Counts of texts that threads and processes encode; work done at once is not counted."""

    pending = gauge("Texts that threads and processes encode or decode now, and texts that wait for them.")
    abandoned = counter("Texts whose client disconnected before they were encoded.")
    refused = counter("Texts refused for their length.")


class AsyncEncoder:
    """A `TextEncoder` whose methods do not block the event loop. All middlewares of a router share one (`of`). The
    methods behave like the methods of `TextEncoder`, and raise `TextTooLong` beyond `longest`.

    Args:
        longest: the maximum length of an input, in characters or ids.
    """

    def __init__(self, tokenizer: Any, *, longest: int) -> None:
        #: For work that is always short: it runs in the caller.
        self.encoder = TextEncoder(tokenizer)
        self.statistics = EncodingStatistics(pending=lambda: self._pending)
        self._longest = longest
        self._pending = 0
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="encoder")
        self._processes = _EncoderProcesses(tokenizer)

    @classmethod
    def of(cls, router: Router) -> AsyncEncoder:
        """Return the router's shared encoder; create it at the first call."""
        found: AsyncEncoder | None = getattr(router.state, NAME, None)
        if found is None:
            found = cls(router.tokenizer, longest=router.config.max_text_chars)
            setattr(router.state, NAME, found)
            router.publish(NAME, found.statistics)
        return found

    @contextlib.asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """Prepare the tokenizer for encoder processes, and end the processes on exit. Preparing it later would block
        the event loop for a moment."""
        self._processes.pack()
        try:
            yield
        finally:
            await asyncio.to_thread(self._processes.close)
            self._threads.shutdown(wait=False, cancel_futures=True)

    def check(self, length: int) -> None:
        """Refuse an input of `length` characters or ids if it is too long.

        Raises:
            TextTooLong: it is longer than `--max-text-chars`.
        """
        if length > self._longest:
            self.statistics.refused += 1
            raise TextTooLong(f"a text of {length} characters or ids is longer than {self._longest} (--max-text-chars)")

    async def encode_whole(self, text: str) -> Encoding:
        encoding: Encoding = await self._run(len(text), methodcaller("encode_whole", text))
        return encoding

    async def encode_rendered(self, text: str) -> Tokens:
        ids: Tokens = await self._run(len(text), methodcaller("encode_rendered", text))
        return ids

    async def encode_rest(self, text: str) -> Encoding:
        encoding: Encoding = await self._run(len(text), methodcaller("encode_rest", text))
        return encoding

    async def encode_behind(self, text: str, token: int | None) -> Tokens:
        ids: Tokens = await self._run(len(text), methodcaller("encode_behind", text, token))
        return ids

    async def spell_whole(self, ids: Sequence[int]) -> Spelling:
        spelling: Spelling = await self._run(len(ids), methodcaller("spell_whole", ids))
        return spelling

    async def align(self, ids: Sequence[int], text: str, **how: Any) -> Alignment:
        """Align an answer. Its length is not limited."""
        alignment: Alignment = await self._run(len(ids), methodcaller("align", ids, text, **how), answer=True)
        return alignment

    async def _run(self, length: int, work: EncoderWork, *, answer: bool = False) -> Any:
        if length <= AT_ONCE:
            return work(self.encoder)
        if not answer:
            self.check(length)
        self._pending += 1
        try:
            if length <= IN_A_THREAD:
                return await asyncio.get_running_loop().run_in_executor(self._threads, work, self.encoder)
            return await self._processes.run(work, keep=length <= LARGE)
        except asyncio.CancelledError:
            self.statistics.abandoned += 1
            raise
        finally:
            self._pending -= 1


@dataclass
class _Visit:
    """One use of a process. `keep`: the process may be reused afterwards; `cancelled`: the caller was cancelled."""

    keep: bool
    process: EncoderProcess | None = None
    cancelled: bool = False


class _EncoderProcesses:
    """A pool of encoder processes, started on demand, with one thread for each that talks to it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._packed: PackedTokenizer | None = None
        self._threads = ThreadPoolExecutor(PROCESSES, thread_name_prefix="encoder process")
        self._lock = threading.Lock()
        self._idle: list[EncoderProcess] = []
        self._closed = False

    def pack(self) -> PackedTokenizer:
        """Return the tokenizer in the form that processes receive; pack it once."""
        if self._packed is None:
            self._packed = PackedTokenizer.of(self._tokenizer)
        return self._packed

    async def run(self, work: EncoderWork, *, keep: bool) -> Any:
        """Run work in the next free process. Cancelling the caller kills the process.

        Raises:
            Unavailable: the process ended during the work, or no process could be started.
        """
        visit = _Visit(keep)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._work, visit, work)
        except asyncio.CancelledError:
            with self._lock:
                visit.cancelled = True
                if visit.process is not None:
                    visit.process.kill()
            raise

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, []
        for process in idle:
            process.close()

    def _work(self, visit: _Visit, work: EncoderWork) -> Any:
        """Run work in a process and return its result; runs in a thread."""
        while True:
            process, kept = self._acquire(visit)
            try:
                result = process.run(work)
            except Unavailable:
                self._discard(visit, process)
                if not kept:
                    raise
                # A reused process may have been killed while it was idle: that is not this text's fault, so retry.
            except RouterError:  # raised by the work itself: the process is fine
                self._release(visit, process)
                raise
            else:
                self._release(visit, process)
                return result

    def _acquire(self, visit: _Visit) -> tuple[EncoderProcess, bool]:
        """Return a process, and whether an earlier visit used it already."""
        with self._lock:
            if visit.cancelled or self._closed:
                raise Unavailable("the router is stopping and encodes no further texts")
            kept = self._idle.pop() if self._idle else None
            visit.process = kept or EncoderProcess(self.pack())
            return visit.process, kept is not None

    def _discard(self, visit: _Visit, process: EncoderProcess) -> None:
        with self._lock:
            visit.process = None
        process.close()

    def _release(self, visit: _Visit, process: EncoderProcess) -> None:
        with self._lock:
            visit.process = None
            usable = visit.keep and not (visit.cancelled or self._closed)
            if usable:
                self._idle.append(process)
        if not usable:
            process.close()
