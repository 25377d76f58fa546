"""The workloads that are shipped, and the adversarial ones; each is made from a seed.

    python -m tests.benchmarks.placement.generators grpo --seed 0 > grpo.jsonl

Nothing in the router or in the benchmark knows their names but this file.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from tests.benchmarks.placement.workload import Episode, Turn, lines

MOST_OUTPUT = 16_384


def _lognormal(source: random.Random, median: float, sigma: float, most: float) -> float:
    return min(most, median * source.lognormvariate(0.0, sigma))


def _tokens(source: random.Random, median: float, sigma: float, most: int) -> int:
    return max(1, round(_lognormal(source, median, sigma, most)))


def _reasoning(source: random.Random, difficulty: float) -> int:
    """Lengths as reasoning models show them: most answers short, wrong ones several times as long, some that never end
    and are cut. How many are long depends on the question."""
    kind = source.random()
    if kind < 0.03 * difficulty:
        return MOST_OUTPUT
    if kind < 0.25 * difficulty:
        return _tokens(source, 5000, 0.5, MOST_OUTPUT)
    return _tokens(source, 1500, 0.5, MOST_OUTPUT)


def _group(source: random.Random, name: str, samples: int, length: Callable[[], int], at: float = 0.0) -> list[Episode]:
    """Samples of one prompt."""
    prompt = _tokens(source, 500, 0.6, 4000)
    return [Episode((Turn(length()),), prompt, prompt, name, at) for _ in range(samples)]


def _agent(source: random.Random, name: str, shared: int, turns: int, at: float) -> Episode:
    """A session: short answers, tools that take a while, results to read."""
    played = [
        Turn(
            _tokens(source, 220, 0.8, 4000),
            round(_lognormal(source, 2.0, 1.0, 30.0), 3),
            _tokens(source, 350, 1.0, 6000),
        )
        for _ in range(turns)
    ]
    return Episode(tuple(played), shared + _tokens(source, 300, 0.5, 2000), shared, name, round(at, 3))


def grpo(seed: int) -> list[Episode]:
    """128 groups of 8 samples at once: half with lognormal lengths, half with those of a reasoning model."""
    source = random.Random(f"grpo {seed}")
    episodes = []
    for number in range(128):
        if number % 2:
            difficulty = source.choice([0.2, 0.6, 1.0, 2.0])
            episodes += _group(source, f"g{number}", 8, partial(_reasoning, source, difficulty))
        else:
            median = _lognormal(source, 1500, 0.6, 8000)
            episodes += _group(source, f"g{number}", 8, partial(_tokens, source, median, 0.7, MOST_OUTPUT))
    return episodes


def agents(seed: int) -> list[Episode]:
    """48 tasks with 4 sessions of 20 turns each, begun within 5 s; those of a task share what they are told first."""
    source = random.Random(f"agents {seed}")
    episodes = []
    for task in range(48):
        shared = _tokens(source, 2500, 0.3, 6000)
        episodes += [_agent(source, f"t{task}", shared, 20, source.uniform(0, 5)) for _ in range(4)]
    return episodes


def mixed(seed: int) -> list[Episode]:
    """48 groups of 8 samples, begun within 30 s, beside 96 sessions of 5 to 25 turns."""
    source = random.Random(f"mixed {seed}")
    episodes = []
    for number in range(48):
        median, at = _lognormal(source, 1000, 0.6, 8000), round(source.uniform(0, 30), 3)
        length = partial(_tokens, source, median, 0.7, MOST_OUTPUT)
        episodes += _group(source, f"g{number}", 8, length, at)
    for task in range(24):
        shared = _tokens(source, 2500, 0.3, 6000)
        episodes += [_agent(source, f"t{task}", shared, source.randint(5, 25), source.uniform(0, 10)) for _ in range(4)]
    source.shuffle(episodes)
    return episodes


def equal(seed: int) -> list[Episode]:
    """384 sessions that are all alike."""
    del seed
    turns = (Turn(300, 2.0, 300),) * 8
    return [Episode(turns, 1000) for _ in range(384)]


def giant(seed: int) -> list[Episode]:
    """127 small sessions and one that is many times as long as each."""
    source = random.Random(f"giant {seed}")
    episodes = [_agent(source, f"t{number}", 1000, 5, source.uniform(0, 5)) for number in range(127)]
    large = tuple(Turn(1500, 1.0, 4000) for _ in range(10))
    episodes.insert(source.randrange(128), Episode(large, 40_000, 0, "giant", 2.0))
    return episodes


def one_prefix(seed: int) -> list[Episode]:
    """256 sessions of 4 turns that all begin with the same 8,000 tokens."""
    source = random.Random(f"one prefix {seed}")
    return [_agent(source, "all", 8000, 4, source.uniform(0, 10)) for _ in range(256)]


def no_prefix(seed: int) -> list[Episode]:
    """1,024 samples that share nothing."""
    source = random.Random(f"no prefix {seed}")
    return [
        Episode((Turn(_tokens(source, 800, 0.7, 8000)),), _tokens(source, 1500, 0.7, 8000), 0, f"e{number}")
        for number in range(1024)
    ]


def _few(seed: int) -> list[Episode]:
    """What the fleets that change are tried with: 24 groups of 8 samples and 48 sessions of 10 turns."""
    source = random.Random(f"few {seed}")
    groups = [_group(source, f"g{n}", 8, partial(_tokens, source, 900, 0.7, 8000)) for n in range(24)]
    sessions = [_agent(source, f"t{number % 12}", 2000, 10, source.uniform(0, 5)) for number in range(48)]
    return [*chain.from_iterable(groups), *sessions]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Episodes by seed, and the fleet that plays them.

    `speeds` are of the first workers, 1 for the rest. At `loses_at`, in the fleet's seconds, the last worker is lost.
    """

    name: str
    episodes: Callable[[int], list[Episode]]
    speeds: tuple[float, ...] = ()
    loses_at: float | None = None

    def with_fleet(self, speeds: tuple[float, ...], loses_at: float | None) -> Scenario:
        """The same on another fleet, where one is given."""
        return replace(self, speeds=speeds or self.speeds, loses_at=self.loses_at if loses_at is None else loses_at)


SHIPPED = {each.name: each for each in (Scenario("grpo", grpo), Scenario("agents", agents), Scenario("mixed", mixed))}
ADVERSARIAL = {
    each.name: each
    for each in (
        Scenario("equal", equal),
        Scenario("giant", giant),
        Scenario("slow-worker", _few, speeds=(0.5,)),
        Scenario("lost-worker", _few, loses_at=30.0),
        Scenario("one-prefix", one_prefix),
        Scenario("no-prefix", no_prefix),
    )
}
SCENARIOS = {**SHIPPED, **ADVERSARIAL}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=list(SCENARIOS))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sys.stdout.write(lines(SCENARIOS[options.workload].episodes(options.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
