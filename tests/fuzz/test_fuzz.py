"""Every target holds its whole corpus, and what a seed makes of it. In `make test` the seed is always the same one."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.fuzz.entrances import TARGETS
from tests.fuzz.search import Search, bounded, corpus
from tests.fuzz.target import CORPUS, Target
from tests.support.tiers import fuzzing

ROOT = CORPUS.parents[2]
MOST_BYTES = 200_000


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    made = TARGETS[request.param]()
    yield made
    made.close()


def test_every_input_of_the_corpus_holds(target: Target) -> None:
    inputs = corpus(target.name)
    assert inputs
    broken = []
    for name, data in inputs:
        try:
            with bounded():
                target.check(data)
        except Exception as error:  # noqa: BLE001 - all of them are told
            broken.append(f"{name}: {type(error).__name__}: {error}")
    assert not broken, "\n".join(broken)


def test_no_made_up_input_breaks_the_oracle(target: Target) -> None:
    runs, seconds, seed = fuzzing(target.runs)
    search = Search(target, random.SystemRandom().randrange(1 << 30) if seed is None else seed)
    finding = search.run(runs=runs, seconds=seconds)
    again = f"python -m tests.fuzz --target {target.name} --seed {search.seed} --runs {search.runs}"
    assert finding is None, f"{finding.problem}\n{finding.data!r}\nagain, and into the corpus: {again}"


def test_the_corpus_is_small_and_of_targets_that_there_are() -> None:
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MOST_BYTES
    assert {path.parent.name for path in files} == set(TARGETS)


def test_the_command_searches_for_a_while_and_says_what_it_did() -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--target", "event-streams", "--seconds", "0.5", "--seed", "1"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.startswith("seed 1\n")
    assert done.stdout.endswith(" inputs, 0 findings\n")
