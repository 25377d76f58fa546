"""Run a simulated worker in a thread, for code without an event loop."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from miles_router.testing.worker.simulated_worker import SimulatedWorker

_PATIENCE_S = 30.0


@contextmanager
def worker_in_thread(**options: Any) -> Iterator[SimulatedWorker]:
    """Yield a started `SimulatedWorker(**options)`, and stop it when the block ends.

    Other threads may read `door` and plan `faults`, but must not await the worker's coroutines.
    """
    worker = SimulatedWorker(**options)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="simulated worker", daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(worker.start(), loop).result(_PATIENCE_S)
        yield worker
    finally:
        asyncio.run_coroutine_threadsafe(worker.stop(), loop).result(_PATIENCE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_PATIENCE_S)
        loop.close()
