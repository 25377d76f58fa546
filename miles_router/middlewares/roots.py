"""Roots: the texts that rollouts' first turns were given. Whatever goes on from one begins with it, so that it is known
without a key. Of a root only hashes are kept: of all of it, and of its whole blocks, by which the roots that a text may
begin with are found."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, NamedTuple

#: Bytes of UTF-8. A look-up hashes a text once, up to the longest root, with a stop at each block behind which a root
#: ends; and there as many beginnings as roots of different lengths end in that block.
BLOCK = 64
DIGEST = 16


class Root(NamedTuple):
    """A root as all processes know it: hashes of its text and of the text's whole blocks, and its length in bytes."""

    digest: bytes
    blocks: bytes
    length: int

    @classmethod
    def of(cls, text: str) -> Root:
        """The root that a text is."""
        data = memoryview(encoded(text))
        end = len(data) // BLOCK * BLOCK
        hasher = hash_of(data[:end])
        blocks = hasher.digest()
        hasher.update(data[end:])
        return cls(hasher.digest(), blocks, len(data))

    @classmethod
    def read(cls, digest: str, blocks: str, length: int) -> Root:
        """A root that was written down, its hashes in hexadecimal.

        Raises:
            ValueError, TypeError: it is none.
        """
        root = cls(bytes.fromhex(digest), bytes.fromhex(blocks), int(length))
        if not len(root.digest) == len(root.blocks) == DIGEST or not 0 <= root.length < 1 << 32:
            raise ValueError("these are no hashes of a root")
        return root


def encoded(text: str) -> bytes:
    """A text as it is hashed. JSON can spell halves of characters."""
    return text.encode("utf-8", "surrogatepass")


def hash_of(data: bytes | memoryview) -> Any:
    """The hash of roots, which can be gone on with."""
    return blake2b(data, digest_size=DIGEST)
