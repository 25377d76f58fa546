"""A process that commits to a state directory without end, and says on its output what was acknowledged.

    python -m tests.support.committing DIRECTORY SYNC OWNERS [BYTES]

Line `i` of owner `n` says that its blob `i` is durable; `value` is its content. A refusal is a line `! type`, and the
owner tries the same blob again.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from pathlib import Path

from miles_router.errors import StateError
from miles_router.state.blobs import Sync
from miles_router.state.store import StateStore


def value(owner: str, number: int, size: int) -> bytes:
    """The blob of an owner: nothing that compresses, and always the same."""
    return hashlib.shake_128(f"{owner} {number}".encode()).digest(size)


async def commit(store: StateStore, owner: str, size: int) -> None:
    number = 0
    while True:
        try:
            await store.append(owner, {number: value(owner, number, size)})
        except StateError as error:
            print(f"! {error.label}", flush=True)
            await asyncio.sleep(0.01)
        else:
            print(f"{owner} {number}", flush=True)
            number += 1


async def main(directory: str, sync: Sync, owners: int, size: int) -> None:
    store = StateStore(Path(directory), sync)
    await asyncio.gather(*(commit(store, f"owner-{each}", size) for each in range(owners)))


if __name__ == "__main__":
    place, sync, owners, size = (*sys.argv[1:], "3000")[:4]
    asyncio.run(main(place, "machine" if sync == "machine" else "process", int(owners), int(size)))
