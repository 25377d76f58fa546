"""The part of a state store that belongs to the middlewares of one model."""

from __future__ import annotations

from collections.abc import AsyncIterator

from miles_router.slots import slot_of
from miles_router.state.blobs import Blobs, Changes
from miles_router.state.store import NOTHING, StateStore


class StoreOfModel(StateStore):
    """A store whose owners are apart from those of other models: their names have a prefix in the whole store.

    An owner's slot is that of the name without the prefix. Slots are the whole store's, which alone can be closed.
    """

    def __init__(self, whole: StateStore, model_id: str) -> None:
        self._whole = whole
        self._prefix = f"|model-{model_id}|"
        self.directory, self.sync, self.slots = whole.directory, whole.sync, whole.slots

    async def append(
        self,
        owner: str,
        blobs: Changes,
        *,
        large: Changes = NOTHING,
        slot: int | None = None,
        replace_all: bool = False,
    ) -> None:
        slot = slot_of(owner) if slot is None else slot
        await self._whole.append(self._prefix + owner, blobs, large=large, slot=slot, replace_all=replace_all)

    async def delete(self, owner: str, *, slot: int | None = None, large_alone: bool = False) -> None:
        slot = slot_of(owner) if slot is None else slot
        await self._whole.delete(self._prefix + owner, slot=slot, large_alone=large_alone)

    async def load(self, owner: str, *, large: bool = False, slot: int | None = None) -> Blobs:
        slot = slot_of(owner) if slot is None else slot
        return await self._whole.load(self._prefix + owner, large=large, slot=slot)

    async def owners(self, slot: int, *, after: str = "", page: int = 1000) -> AsyncIterator[tuple[str, bytes]]:
        async for owner, head in self._whole.owners(slot, after=self._prefix + after, page=page):
            if not owner.startswith(self._prefix):  # owners are sorted
                return
            yield owner.removeprefix(self._prefix), head

    def exists(self, slot: int) -> bool:
        return self._whole.exists(slot)

    async def claim(self, slot: int, epoch: int | None = None) -> int:
        return await self._whole.claim(slot, epoch)
