"""Made-up rollouts with the shape of real ones, for the text cache: words, tokens of a few characters, GRPO groups of
eight over one prompt, several turns each, a stop token behind every answer. No tokenizer: the cache never sees one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from middleware_hub.radix_tree.cache import PrefixMatch, RadixTreeCache
from middleware_hub.radix_tree.entry import TextRecord
from miles_router.engines.spelling import Ends
from miles_router.trajectory import Piece, Trajectory
from miles_router.trajectory.pieces import Tokens

GROUP = 8
PROMPT_CHARS = 1200  # given: system prompt, question, few-shot examples
ASKED_CHARS = 400  # given at each further turn: a tool's output, the user's next words
ANSWER_CHARS = 1200  # sampled at each turn, about 300 tokens
TURNS = 3
TAIL = "<|im_end|>"  # sampled and not shown
CHARS_PER_TOKEN = 4
POOL_CHARS = 1 << 20


@dataclass(frozen=True)
class Step:
    """One turn: what is given and what is sampled behind it, in characters."""

    given: int
    sampled: int


EVEN = (Step(PROMPT_CHARS, ANSWER_CHARS), *[Step(ASKED_CHARS, ANSWER_CHARS)] * (TURNS - 1))


@cache
def _pool() -> str:
    """Text to cut pieces from. Seeded: every process has the same."""
    chance = random.Random(3)
    words = ["".join(chance.choices("etaoinshrdlucm", k=chance.randint(2, 9))) for _ in range(5000)]
    parts = chance.choices(words, k=POOL_CHARS // 5)
    return " ".join(parts)[:POOL_CHARS]


def text_of(chance: random.Random, chars: int) -> str:
    """So many characters of words."""
    parts = []
    while chars > 0:
        begin = chance.randrange(POOL_CHARS // 2)
        parts.append(_pool()[begin : begin + min(chars, POOL_CHARS // 2)])
        chars -= len(parts[-1])
    return "".join(parts)


def tokens_of(numbers: np.random.Generator, chars: int, offset: int, *, tail: int = 0) -> tuple[Tokens, Ends]:
    """Ids and ends for `chars` characters that stand behind `offset`, and one more token for a tail."""
    steps = numbers.integers(1, 2 * CHARS_PER_TOKEN, size=chars // CHARS_PER_TOKEN + 1, dtype=np.int64)
    ends = np.cumsum(steps)
    ends = np.append(ends[ends < chars], chars)
    ends = np.append(ends, chars + tail) if tail else ends
    return numbers.integers(0, 150_000, size=len(ends), dtype=np.int32), (ends + offset).astype(np.uint32)


class Rollouts:
    """Plays rollouts against a cache as the middleware does: match, continue, record."""

    def __init__(self, seed: int = 0) -> None:
        self.chance = random.Random(seed)
        self._numbers = np.random.default_rng(seed)
        self._made = 0

    def given(self, match: PrefixMatch, rest: int) -> tuple[Trajectory, Ends]:
        """What the engine is given: the match and an encoding of `rest` more characters."""
        ids, ends = tokens_of(self._numbers, rest, match.chars)
        return match.trajectory.append(Piece.given(ids)), np.concatenate([match.ends, ends])

    def answered(self, text: str, given: tuple[Trajectory, Ends], chars: int, version: str = "1") -> TextRecord:
        """The record of `chars` sampled characters behind `text`, and a hidden stop token."""
        answer = text_of(self.chance, chars)
        ids, ends = tokens_of(self._numbers, chars, len(text), tail=len(TAIL))
        logprobs = -self._numbers.random(len(ids), dtype=np.float32)
        self._made += 1
        return TextRecord(
            text=text + answer + TAIL,
            shown_chars=len(text) + chars,
            trajectory=given[0].append(Piece.sampled(ids, logprobs, version)),
            ends=np.concatenate([given[1], ends]),
            rid=f"{self.chance.getrandbits(128):032x}",
            finish="stop",
        )

    def turn(self, cache: RadixTreeCache, text: str, sampled: int) -> TextRecord:
        """One turn: look `text` up, answer it, record the answer."""
        match = cache.match(text)
        record = self.answered(text, self.given(match, len(text) - match.chars), sampled)
        cache.record(record, match)
        return record

    def episode(self, cache: RadixTreeCache, prompt: str, steps: tuple[Step, ...]) -> Iterator[TextRecord]:
        """A rollout of several turns behind a prompt; gives each turn's record."""
        text = prompt
        for number, step in enumerate(steps):
            if number:
                text += text_of(self.chance, step.given)
            record = self.turn(cache, text, step.sampled)
            text = record.text
            yield record

    def groups(self, cache: RadixTreeCache, rollouts: int) -> None:
        """So many rollouts, in groups that share a prompt and take their turns side by side."""
        for _ in range(rollouts // GROUP):
            prompt = text_of(self.chance, EVEN[0].given)
            together = [self.episode(cache, prompt, EVEN) for _ in range(GROUP)]
            for _ in EVEN:
                for one in together:
                    next(one)

    def long(self, cache: RadixTreeCache, chars: int, turns: int) -> str:
        """One rollout whose text has `chars` characters, hidden tail included, in so many turns; gives that text."""
        each = chars // turns
        half = (each - len(TAIL)) // 2
        steps = [Step(each - len(TAIL) - half, half)] * turns
        steps[0] = Step(steps[0].given + chars - each * turns, half)
        last = ""
        for record in self.episode(cache, text_of(self.chance, steps[0].given), tuple(steps)):
            last = record.text
        assert len(last) == chars
        return last


def new_cache(max_tokens: int = 1 << 40) -> RadixTreeCache:
    """A cache that has room for everything."""
    return RadixTreeCache(max_tokens=max_tokens, keep_versions=2)
