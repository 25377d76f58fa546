"""How much of a prompt a real engine would find in its prefix cache."""

import zlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

_ID_BYTES = 8
_BLOCK = 16 * _ID_BYTES


class PrefixCache:
    """Token-exact longest-prefix lengths over the sequences seen lately; bounded in tokens, oldest dropped. Only those
    of the same `key` share a prefix."""

    def __init__(self, max_tokens: int = 500_000) -> None:
        self._max_tokens = max_tokens
        # The hash of every known prefix. Whole blocks are looked up at once, so that long prompts stay cheap.
        # With the weight version that computed its last token's keys and values.
        self._prefixes: OrderedDict[int, str] = OrderedDict()
        self._versions: set[str] = set()

    def match(self, ids: Sequence[int], key: str = "") -> int:
        """Tokens of `ids` that are cached; never all of them, since the last must be computed to sample from."""
        raw = array("q", ids).tobytes()
        known, prefix = self._known_blocks(raw, key)
        while known < len(raw):
            prefix = _extended(prefix, raw[known : known + _ID_BYTES])
            if prefix not in self._prefixes:
                break
            known += _ID_BYTES
        return min(known // _ID_BYTES, len(ids) - 1)

    def versions(self, ids: Sequence[int], key: str = "") -> list[str]:
        """The weight versions that computed these, all of which are cached, in the order of their first tokens."""
        if len(self._versions) < 2:
            return list(self._versions) if ids else []
        raw, prefix = array("q", ids).tobytes(), _begun(key)
        found: dict[str, None] = {}
        for start in range(0, len(raw), _ID_BYTES):
            prefix = _extended(prefix, raw[start : start + _ID_BYTES])
            if prefix in self._prefixes:  # else it has made room already
                found[self._prefixes[prefix]] = None
        return list(found)

    def insert(self, ids: Sequence[int], key: str = "", version: str = "") -> None:
        """Remember a sequence whose keys and values have been computed, those that are new by this version."""
        raw = array("q", ids).tobytes()
        known, prefix = self._known_blocks(raw, key)
        self._versions.add(version)
        for start in range(known, len(raw), _ID_BYTES):
            prefix = _extended(prefix, raw[start : start + _ID_BYTES])
            self._prefixes.setdefault(prefix, version)
        while len(self._prefixes) > self._max_tokens:
            self._prefixes.popitem(last=False)

    def clear(self) -> None:
        self._prefixes.clear()
        self._versions.clear()

    def _known_blocks(self, raw: bytes, key: str) -> tuple[int, int]:
        """Bytes of the longest cached prefix in whole blocks, and its hash."""
        known, prefix = 0, _begun(key)
        while known + _BLOCK <= len(raw):
            longer = _extended(prefix, raw[known : known + _BLOCK])
            if longer not in self._prefixes:
                break
            known, prefix = known + _BLOCK, longer
        return known, prefix


def _begun(key: str) -> int:
    """The hash of the empty prefix."""
    return _extended(0, key.encode()) if key else 0


def _extended(prefix: int, raw: bytes) -> int:
    """The hash of a prefix and what follows it; two checksums, as either alone confuses some sequences."""
    return (zlib.crc32(raw, prefix >> 32) << 32) | zlib.adler32(raw, prefix & 0xFFFFFFFF)
