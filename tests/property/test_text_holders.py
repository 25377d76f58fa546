"""Text rollouts on several processes that ask each other, beside the same rollouts on one: never other ids."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from middleware_hub.radix_tree.archive.archive import TextArchive
from middleware_hub.radix_tree.archive.text_rows import TextRows
from middleware_hub.radix_tree.cache import RadixTreeCache
from middleware_hub.radix_tree.entry import TextRecord
from middleware_hub.radix_tree.holders import HOLDS, TextHolders, best_process
from middleware_hub.radix_tree.recording import TextRecorder
from miles_router.middlewares import Scope
from miles_router.middlewares.state import Elsewhere, Owners
from miles_router.trajectory import Piece
from tests.support.tiers import examples
from tests.support.waiting import at_once

PROCESSES = 4
SAMPLES, TURNS = 8, 5
MAX_TOKENS = 1 << 30


class Direct(Owners):
    """The owners of one process, which asks the others without a connection."""

    several = True

    def __init__(self, index: int, processes: Sequence[Process]) -> None:
        self._index = index
        self._processes = processes

    def others(self, scope: Scope) -> Sequence[int]:
        return [index for index in range(PROCESSES) if index != self._index]

    async def answers_to(self, scope: Scope, body: bytes) -> list[Any]:
        texts = orjson.loads(body)[HOLDS]
        return [await self._processes[index].holders.look_up(texts) for index in self.others(scope)]


class Process:
    """One process: its cache, and what it asks."""

    def __init__(self, index: int, processes: Sequence[Process]) -> None:
        self.cache = RadixTreeCache(max_tokens=MAX_TOKENS, keep_versions=1)
        archive = TextArchive(self.cache, None, TextRows({}, write=False), max_tokens=MAX_TOKENS)
        recorder = TextRecorder(self.cache, archive, cast(Any, None))  # nothing is encoded
        self.holders = TextHolders(recorder, Direct(index, processes))


def turn(cache: RadixTreeCache, text: str, answer: str, rid: str) -> list[int]:
    """Answer a text and record that: a token for each character, other ids where it was sampled. The ids of both."""
    match = cache.match(text)
    given = Piece.given([ord(char) for char in text[match.chars :]])
    sampled = Piece.sampled([ord(char) + 1000 for char in answer], [-1.0] * len(answer), "1")
    trajectory = match.trajectory.append(given, sampled)
    whole = text + answer
    ends = np.arange(1, len(whole) + 1, dtype=np.uint32)
    record: Any = TextRecord(whole, len(whole), trajectory, ends, rid, "stop")
    cache.record(record, match)
    tokens: list[int] = trajectory.tokens.tolist()
    return tokens


@settings(max_examples=examples(60))
@given(
    prompts=st.integers(1, 6),
    common=st.sampled_from((0, 10, 64, 3000)),
    alone=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_processes_that_ask_each_other_give_the_ids_of_one(prompts: int, common: int, alone: bool, seed: int) -> None:
    """Groups of prompts that begin alike, eight samples each, five turns: every request lands anywhere."""
    dice = random.Random(seed)
    processes: list[Process] = []
    processes += [Process(index, processes) for index in range(PROCESSES)]
    one = RadixTreeCache(max_tokens=MAX_TOKENS, keep_versions=1)
    system = "s" * common
    rollouts = [(f"{system}Question {prompt}:", sample) for prompt in range(prompts) for sample in range(SAMPLES)]
    texts = {each: each[0] for each in rollouts}
    if alone and system:  # somebody asks for the shared beginning itself
        texts[system, 0] = system
    waiting = [each for each in texts for _ in range(TURNS)]
    dice.shuffle(waiting)
    for number, rollout in enumerate(waiting):
        text, at = texts[rollout], dice.randrange(PROCESSES)
        answer = "".join(dice.choices("xyz", k=dice.randint(1, 4)))
        try:
            at_once(processes[at].holders.require({}, [text]))
        except Elsewhere as elsewhere:
            at = elsewhere.owner
        assert turn(processes[at].cache, text, answer, f"r{number}") == turn(one, text, answer, f"r{number}")
        whole = f"{text}{answer}"
        owner = best_process(at_once(processes[dice.randrange(PROCESSES)].holders.ask({}, [whole])), 0)
        assert owner is None or processes[owner].cache.has(whole)
        texts[rollout] = f"{whole} and {dice.randrange(3)}?"
