"""A model of an engine's prefix cache: how many tokens of a prompt it would find."""

import zlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

_ID_BYTES = 8
_BLOCK = 16 * _ID_BYTES


class PrefixCache:
    """The token prefixes of recent sequences, at most `max_tokens` of them; the oldest are dropped.

    Only sequences with the same `key` share prefixes.
    """

    def __init__(self, max_tokens: int = 500_000) -> None:
        self._max_tokens = max_tokens
        # Hashes of all known prefixes. Lookups go block by block first, so that long prompts stay cheap.
        self._prefixes: OrderedDict[int, None] = OrderedDict()

    def match(self, ids: Sequence[int], key: str = "") -> int:
        """Return how many tokens of `ids` are cached; never all, since sampling needs the last one computed."""
        raw = array("q", ids).tobytes()
        known, prefix = self._known_blocks(raw, key)
        while known < len(raw):
            prefix = _extended(prefix, raw[known : known + _ID_BYTES])
            if prefix not in self._prefixes:
                break
            known += _ID_BYTES
        return min(known // _ID_BYTES, len(ids) - 1)

    def insert(self, ids: Sequence[int], key: str = "") -> None:
        """Add a sequence whose KV entries exist."""
        raw = array("q", ids).tobytes()
        known, prefix = self._known_blocks(raw, key)
        for start in range(known, len(raw), _ID_BYTES):
            prefix = _extended(prefix, raw[start : start + _ID_BYTES])
            self._prefixes.setdefault(prefix)
        while len(self._prefixes) > self._max_tokens:
            self._prefixes.popitem(last=False)

    def clear(self) -> None:
        self._prefixes.clear()

    def _known_blocks(self, raw: bytes, key: str) -> tuple[int, int]:
        """Return the length in bytes of the longest cached prefix in whole blocks, and its hash."""
        known, prefix = 0, _begun(key)
        while known + _BLOCK <= len(raw):
            longer = _extended(prefix, raw[known : known + _BLOCK])
            if longer not in self._prefixes:
                break
            known, prefix = known + _BLOCK, longer
        return known, prefix


def _begun(key: str) -> int:
    """Return the hash of the empty prefix under a key."""
    return _extended(0, key.encode()) if key else 0


def _extended(prefix: int, raw: bytes) -> int:
    """Return the hash of a prefix extended by `raw`. It combines two checksums, since either alone has collisions."""
    return (zlib.crc32(raw, prefix >> 32) << 32) | zlib.adler32(raw, prefix & 0xFFFFFFFF)
