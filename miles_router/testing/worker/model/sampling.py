"""Seeded sampling: the next id, and its logprob.

Everything is a pure function of (seed, ids so far, noise key, position), so that runs are repeatable. A logprob depends
only on the context and the id: scoring a sampled sequence again gives the logprobs of the sampling.
"""

import zlib
from array import array
from collections.abc import Collection, Sequence

_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """Return 64 well-mixed bits of an integer (the finaliser of splitmix64)."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def key_of(text: str) -> int:
    """Return a 64-bit key of a string, the same in every process."""
    raw = text.encode("utf-8", "surrogatepass")
    return mix((zlib.crc32(raw) << 32) ^ zlib.adler32(raw))


def context_hash(ids: Sequence[int], previous: int = 0) -> int:
    """Return a hash of a token sequence that can be continued: `h(a + b) == h(b, h(a))`."""
    return zlib.crc32(array("q", ids).tobytes(), previous)


class Sampler:
    """The model's "weights": samplers with the same seed and vocabulary sample the same."""

    def __init__(self, *, seed: int, vocab_size: int, stop_ids: Collection[int], stop_probability: float) -> None:
        self._seed = mix(seed + 0x9E3779B97F4A7C15)
        self._vocab_size = vocab_size
        self._stop_ids = sorted(stop_ids)
        self._stop_threshold = int(stop_probability * (1 << 24))

    def greedy(self, context: int) -> int:
        """Return the most likely id after a context."""
        return self._pick(mix((context << 8) ^ self._seed))

    def sampled(self, context: int, noise: int, position: int) -> int:
        """Return an id drawn from the whole vocabulary; `noise` distinguishes samples of one prompt."""
        return self._pick(mix(mix((context << 8) ^ self._seed ^ noise) + position))

    def logprob(self, context: int, token: int) -> float:
        """Return a logprob between -9 and 0, exact in float32; the greedy id's is the largest."""
        unit = mix((context << 20) ^ (token * 0x2545F4914F6CDD1D) ^ self._seed) & 0xFFFF
        if token == self.greedy(context):
            return -(unit + 1) / 65536
        return -1.0 - (unit + 1) / 8192

    def top_logprobs(self, context: int, count: int) -> list[tuple[float, int]]:
        """Return `count` (logprob, id) pairs, the largest logprob first."""
        favourite = self.greedy(context)
        others = {mix((context << 16) ^ self._seed ^ rank) % self._vocab_size for rank in range(count)} - {favourite}
        pairs = [(self.logprob(context, token), token) for token in (favourite, *others)]
        return sorted(pairs, reverse=True)[:count]

    def support(self, context: int, token: int, count: int) -> list[int]:
        """Return `count` ids that could have been sampled after a context, `token` among them."""
        likely = [each for _, each in self.top_logprobs(context, count)]
        return likely if token in likely else [*likely[: count - 1], token]

    def _pick(self, bits: int) -> int:
        if (bits >> 40) < self._stop_threshold:
            return self._stop_ids[bits % len(self._stop_ids)]
        return bits % self._vocab_size
