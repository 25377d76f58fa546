"""Find the id of a token by its bytes, for a stream that reports bytes and broke off before it reported ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miles_router.engines.spelling import ByteLevelSpeller, speller_for
from miles_router.middlewares import Pace

STEP = 500  # tokens between two yields to the event loop


class TokenNames:
    """A map from the bytes of a token to its id, where only one token has these bytes. The first use builds it.

    Args:
        backend: a `tokenizers.Tokenizer`, or None.
        model_size: the number of ids that the model may sample, if known. An engine reports an id behind the
            tokenizer's
            last one as id 0 (SGLang 0.5.23, `DetokenizerManager._clamp_decode_ids`).
    """

    def __init__(self, backend: Any, model_size: int | None) -> None:
        self._backend = backend
        self._model_size = model_size
        self._ids: dict[bytes, int | None] | None = None

    async def ids(self, spelled: Sequence[bytes]) -> list[int] | None:
        """Return the id of each token, or None if the bytes of one are unknown or ambiguous."""
        if self._ids is None:
            self._ids = await self._find_all()
        found = [self._ids.get(each) for each in spelled]
        return [token for token in found if token is not None] if None not in found else None

    async def _find_all(self) -> dict[bytes, int | None]:
        speller = speller_for(self._backend) if self._backend is not None else None
        if not isinstance(speller, ByteLevelSpeller):
            return {}  # other tokenizers do not determine a token by its bytes
        size = self._backend.get_vocab_size(with_added_tokens=True)
        pace, ids = Pace(), dict[bytes, int | None]()
        for token in range(size):
            spelled = speller.bytes_of(token)
            ids[spelled] = None if spelled in ids else token
            if token % STEP == 0:
                await pace.step()
        if self._model_size is None or self._model_size > size:
            ids[speller.bytes_of(0)] = None
        ids[b""] = None
        return ids
