"""A `TextEncoder` for the event loop. How long work may take decides where it is done:

    at once            a few milliseconds at most
    in a thread        tokenizers work without the interpreter's lock there; what needs it takes a few milliseconds
    in a process       whatever takes longer, and would hold the lock for long: reading a million ids out of a
                       tokenizer, say. It ends with the request that waits for it.

More work than threads and processes waits for its turn; what nobody waits for any more is not begun.
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
from middleware_hub.tokenizing.encoder_process import EncoderLost, EncoderProcess, EncoderWork, PackedTokenizer
from middleware_hub.tokenizing.encoding import Encoding, TextEncoder
from miles_router.engines.spelling import Spelling
from miles_router.errors import BadRequest, RouterError
from miles_router.middlewares import Router, Statistics, counter, gauge
from miles_router.trajectory.pieces import Tokens

#: Characters of a text, or ids, up to which work is done at once, and in a thread.
AT_ONCE, IN_A_THREAD = 4096, 1 << 18
#: A process that did more than this is not kept: it would keep the memory for it.
LARGE = 1 << 21
THREADS, PROCESSES = 4, 2
NAME = "encoding"


class TextTooLong(BadRequest):
    """A text has more characters, or ids, than `--max-text-chars`."""

    status = 413
    type = "text_too_long"


class EncodingStatistics(Statistics, prefix="miles_router_encoding"):
    """What is encoded for middlewares, except for what is done at once."""

    pending = gauge("Texts that are being encoded or spelled beside the event loop, or wait for it.")
    abandoned = counter("Texts whose client left before they were encoded.")
    refused = counter("Texts refused for their length.")


class AsyncEncoder:
    """Does the work of a `TextEncoder`; see there. All middlewares of a router share one (`of`).

    Args:
        longest: characters of a text, and number of ids, that are taken.
    """

    def __init__(self, tokenizer: Any, *, longest: int) -> None:
        #: For work that is always short.
        self.encoder = TextEncoder(tokenizer)
        self.statistics = EncodingStatistics(pending=lambda: self._pending)
        self._longest = longest
        self._pending = 0
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="encoder")
        self._processes = _EncoderProcesses(tokenizer)

    @classmethod
    def of(cls, router: Router) -> AsyncEncoder:
        """The router's one."""
        found: AsyncEncoder | None = getattr(router.state, NAME, None)
        if found is None:
            found = cls(router.tokenizer, longest=router.config.max_text_chars)
            setattr(router.state, NAME, found)
            router.publish(NAME, found.statistics)
        return found

    @contextlib.asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """Makes ready for processes, which would hold the event loop for a moment later, and ends them."""
        self._processes.pack()
        try:
            yield
        finally:
            await asyncio.to_thread(self._processes.close)
            self._threads.shutdown(wait=False, cancel_futures=True)

    def check(self, length: int) -> None:
        """Refuse a text of so many characters, or so many ids.

        Raises:
            TextTooLong: they are too many.
        """
        if length > self._longest:
            self.statistics.refused += 1
            raise TextTooLong(f"a text of {length} characters or ids is longer than {self._longest} (--max-text-chars)")

    async def encode_whole(self, text: str) -> Encoding:
        """See `TextEncoder`."""
        encoding: Encoding = await self._run(len(text), methodcaller("encode_whole", text))
        return encoding

    async def encode_rendered(self, text: str) -> Tokens:
        """See `TextEncoder`."""
        ids: Tokens = await self._run(len(text), methodcaller("encode_rendered", text))
        return ids

    async def encode_rest(self, text: str) -> Encoding:
        """See `TextEncoder`."""
        encoding: Encoding = await self._run(len(text), methodcaller("encode_rest", text))
        return encoding

    async def encode_behind(self, text: str, token: int | None) -> Tokens:
        """See `TextEncoder`."""
        ids: Tokens = await self._run(len(text), methodcaller("encode_behind", text, token))
        return ids

    async def spell_whole(self, ids: Sequence[int]) -> Spelling:
        """See `TextEncoder`."""
        spelling: Spelling = await self._run(len(ids), methodcaller("spell_whole", ids))
        return spelling

    async def align(self, ids: Sequence[int], text: str, **how: Any) -> Alignment:
        """See `TextEncoder`. An answer is never too long."""
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
    """A piece of work with a process; `keep`: the process may do more; `left`: nobody waits for it any more."""

    keep: bool
    process: EncoderProcess | None = None
    left: bool = False


class _EncoderProcesses:
    """The processes, each started when it is needed first, and a thread for each that talks to it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._packed: PackedTokenizer | None = None
        self._threads = ThreadPoolExecutor(PROCESSES, thread_name_prefix="encoder process")
        self._lock = threading.Lock()
        self._idle: list[EncoderProcess] = []
        self._closed = False

    def pack(self) -> PackedTokenizer:
        """The tokenizer as processes are given it, packed once."""
        if self._packed is None:
            self._packed = PackedTokenizer.of(self._tokenizer)
        return self._packed

    async def run(self, work: EncoderWork, *, keep: bool) -> Any:
        """Do work in one of them, as soon as one is free. It ends with its caller.

        Raises:
            EncoderLost: the process ended in the middle of it, or none could be started.
        """
        visit = _Visit(keep)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._work, visit, work)
        except asyncio.CancelledError:
            with self._lock:
                visit.left = True
                if visit.process is not None:
                    visit.process.kill()
            raise

    def close(self) -> None:
        """End them all."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, []
        for process in idle:
            process.close()

    def _work(self, visit: _Visit, work: EncoderWork) -> Any:
        """In a thread: what the work gives."""
        while True:
            process, kept = self._take(visit)
            try:
                result = process.run(work)
            except EncoderLost:
                self._discard(visit, process)
                if not kept:
                    raise
                # It may have been ended while it waited, which is no fault of this text.
            except RouterError:  # the work's own
                self._give_back(visit, process)
                raise
            else:
                self._give_back(visit, process)
                return result

    def _take(self, visit: _Visit) -> tuple[EncoderProcess, bool]:
        """A process for the visit, and whether it was kept from an earlier one."""
        with self._lock:
            if visit.left or self._closed:
                raise EncoderLost("the router does not encode any more")
            kept = self._idle.pop() if self._idle else None
            visit.process = kept or EncoderProcess(self.pack())
            return visit.process, kept is not None

    def _discard(self, visit: _Visit, process: EncoderProcess) -> None:
        with self._lock:
            visit.process = None
        process.close()

    def _give_back(self, visit: _Visit, process: EncoderProcess) -> None:
        with self._lock:
            visit.process = None
            usable = visit.keep and not (visit.left or self._closed)
            if usable:
                self._idle.append(process)
        if not usable:
            process.close()
