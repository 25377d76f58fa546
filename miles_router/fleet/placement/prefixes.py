"""Which unit was last sent a prompt that begins like another: hashes of whole blocks of their bytes, one behind the
other. Two prompts that are spelled alike have the same tokens; a wrong guess costs a prefill and nothing else."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from miles_router.fleet.workers import Unit

BLOCK = 512
#: Blocks of one prompt that are looked at, and of all that are known.
DEEPEST, MOST = 64, 100_000
_FIELDS = (b'"input_ids"', b'"text"', b'"messages"', b'"prompt"', b'"input"')
#: Where the field must begin: what stands before it may be of one request alone.
_HEAD = 4096


class PrefixIndex:
    """Of all requests that were placed by it; those that were used last."""

    def __init__(self) -> None:
        self._units: OrderedDict[int, Unit] = OrderedDict()

    def __len__(self) -> int:
        return len(self._units)

    def find(self, body: bytes) -> tuple[Unit | None, float]:
        """The unit with the longest known beginning of a request's prompt, and which part of the request that is."""
        unit, known = None, 0
        for number, name in enumerate(_blocks(body), 1):
            at = self._units.get(name)
            if at is None:
                break
            unit, known = at, number
        return unit, known * BLOCK / len(body) if known else 0.0

    def note(self, body: bytes, unit: Unit) -> None:
        """A request goes to this unit."""
        for name in _blocks(body):
            self._units[name] = unit
            self._units.move_to_end(name)
        while len(self._units) > MOST:
            self._units.popitem(last=False)


def _blocks(body: bytes) -> Iterator[int]:
    """A name for each whole block of the prompt, which names all before it too."""
    begin = max(0, min((at for name in _FIELDS if (at := body.find(name, 0, _HEAD)) >= 0), default=0))
    name = 0
    for start in range(begin, min(len(body) - BLOCK + 1, begin + DEEPEST * BLOCK), BLOCK):
        name = hash((name, body[start : start + BLOCK]))
        yield name
