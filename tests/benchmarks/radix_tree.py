"""What an operation of the text cache costs on a text of 100,000 characters, and the memory of a token.

    python -m tests.benchmarks.radix_tree [--rollouts 10000] [--repeat 300]

Made-up rollouts, no tokenizer: GRPO groups of 8 over a prompt, three turns each, and a few long ones. Times are of one
operation in this process. Memory is what a fresh process grows by (resident bytes), without the text.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from statistics import median, quantiles

import numpy as np

from middleware_hub.radix_tree.cache import PrefixMatch, RadixTreeCache
from middleware_hub.radix_tree.entry import TextRecord
from miles_router.engines.spelling import Ends
from miles_router.trajectory import Piece, Trajectory
from miles_router.trajectory.pieces import Tokens
from tests.benchmarks.procstat import resident_bytes
from tests.benchmarks.report import environment, number, table

GROUP = 8
PROMPT_CHARS = 1200  # given: system prompt, question, few-shot examples
ASKED_CHARS = 400  # given at each further turn: a tool's output, the user's next words
ANSWER_CHARS = 1200  # sampled at each turn, about 300 tokens
TURNS = 3
TAIL = "<|im_end|>"  # sampled and not shown
CHARS_PER_TOKEN = 4
POOL_CHARS = 1 << 20
#: Of each turn of a rollout: characters given and sampled.
STEPS = [(PROMPT_CHARS, ANSWER_CHARS)] + [(ASKED_CHARS, ANSWER_CHARS)] * (TURNS - 1)
LONG_CHARS, LONG_TURNS, MORE_CHARS = 100_000, (1, 10, 50), 200


class Rollouts:
    """Plays rollouts against a cache as the middleware does: match, continue, record."""

    def __init__(self) -> None:
        self.cache = RadixTreeCache(max_tokens=1 << 40, keep_versions=2)
        self._chance = random.Random(0)
        self._numbers = np.random.default_rng(0)
        words = ["".join(self._chance.choices("etaoinshrdlucm", k=self._chance.randint(2, 9))) for _ in range(5000)]
        self._pool = " ".join(self._chance.choices(words, k=POOL_CHARS // 5))[:POOL_CHARS]

    def text(self, chars: int) -> str:
        """Return so many characters of words, fewer than half of the pool."""
        begin = self._chance.randrange(POOL_CHARS // 2)
        return self._pool[begin : begin + chars]

    def answered(self, text: str, match: PrefixMatch, chars: int) -> TextRecord:
        """Return the record of `chars` sampled characters behind `text`, and a hidden stop token."""
        given, given_ends = self._tokens(len(text) - match.chars, match.chars)
        ids, ends = self._tokens(chars, len(text), tail=len(TAIL))
        logprobs = -self._numbers.random(len(ids), dtype=np.float32)
        trajectory: Trajectory = match.trajectory.append(Piece.given(given))
        return TextRecord(
            text=text + self.text(chars) + TAIL,
            shown_chars=len(text) + chars,
            trajectory=trajectory.append(Piece.sampled(ids, logprobs, "1")),
            ends=np.concatenate([match.ends, given_ends, ends]),
            rid=f"{self._chance.getrandbits(128):032x}",
            finish="stop",
        )

    def groups(self, rollouts: int) -> None:
        """Play so many rollouts, in groups that share a prompt and take their turns side by side."""
        for _ in range(rollouts // GROUP):
            prompt = self.text(PROMPT_CHARS)
            together = [self._episode(prompt, STEPS) for _ in range(GROUP)]
            for _ in range(TURNS):
                for one in together:
                    next(one)

    def long(self, turns: int) -> str:
        """Play one rollout of `LONG_CHARS` characters, hidden tails included, in so many turns. Return its text."""
        each = LONG_CHARS // turns
        sampled = (each - len(TAIL)) // 2
        given = each - len(TAIL) - sampled
        *_, text = self._episode(self.text(given), [(given, sampled)] * turns)
        assert len(text) == LONG_CHARS
        return text

    def timed(self, text: str, repeat: int) -> list[list[float]]:
        """Look up extensions of `text`, record answers to them, retrieve them: the seconds of each operation."""
        return [list(each) for each in zip(*(self._once(text) for _ in range(repeat)), strict=True)]

    def _once(self, text: str) -> tuple[float, float, float]:
        asked = text + self.text(MORE_CHARS)
        begin = time.perf_counter()
        match = self.cache.match(asked)
        looked = time.perf_counter() - begin
        assert match.chars == len(text), "the whole of the held text is reused"
        record = self.answered(asked, match, ANSWER_CHARS)
        begin = time.perf_counter()
        self.cache.record(record, match)
        recorded = time.perf_counter() - begin
        begin = time.perf_counter()
        tokens = self.cache.retrieve(record.text)[-1].trajectory().tokens
        retrieved = time.perf_counter() - begin
        assert np.array_equal(tokens, record.trajectory.tokens), "what is retrieved is what was recorded"
        return looked, recorded, retrieved

    def _episode(self, prompt: str, steps: Sequence[tuple[int, int]]) -> Iterator[str]:
        """Play the turns of one rollout, each a number of characters given and sampled. Yield the text after each."""
        text = prompt
        for at, (given, sampled) in enumerate(steps):
            text += self.text(given) if at else ""
            match = self.cache.match(text)
            record = self.answered(text, match, sampled)
            self.cache.record(record, match)
            text = record.text
            yield text

    def _tokens(self, chars: int, offset: int, *, tail: int = 0) -> tuple[Tokens, Ends]:
        """Return ids and ends for `chars` characters behind `offset`, and one more token for a tail."""
        steps = self._numbers.integers(1, 2 * CHARS_PER_TOKEN, size=chars // CHARS_PER_TOKEN + 1, dtype=np.int64)
        ends = np.cumsum(steps)
        ends = np.append(ends[ends < chars], chars)
        ends = np.append(ends, chars + tail) if tail else ends
        ids = self._numbers.integers(0, 150_000, size=len(ends), dtype=np.int32)
        return ids, (ends + offset).astype(np.uint32)


def bytes_per_token(rollouts: int) -> tuple[int, float]:
    """Fill a cache in this process, which must be fresh. Return its tokens, and what each took without the text."""
    first = Rollouts()
    first.groups(GROUP)  # every module and the pool of text are in memory
    gc.collect()
    before = resident_bytes()
    made = Rollouts()
    made.groups(rollouts)
    del first
    gc.collect()
    return made.cache.tokens, (resident_bytes() - before - made.cache.characters) / made.cache.tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=10_000, help="trajectories held (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=300, help="operations timed of each kind (default: %(default)s)")
    parser.add_argument("--markdown", action="store_true", help="print the table as GitHub markdown")
    options = parser.parse_args()
    print(", ".join(f"{name}: {value}" for name, value in environment().items()))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        tokens, size = fresh.submit(bytes_per_token, options.rollouts).result()
    print(f"{options.rollouts:,} rollouts hold {tokens:,} tokens, {size:.1f} bytes each without the text\n")
    made = Rollouts()
    made.groups(options.rollouts)
    rows = []
    for turns in LONG_TURNS:
        looked, recorded, retrieved = made.timed(made.long(turns), options.repeat)
        figures = [median(looked), quantiles(looked, n=100)[98], median(recorded), median(retrieved)]
        rows.append([f"{turns} turns", *(number(seconds * 1e3, 3) for seconds in figures)])
    print(table(["a text of", "look-up ms", "p99", "record ms", "retrieve ms"], rows, options.markdown))


if __name__ == "__main__":
    main()
