"""How long a step would take if load were even: nearer than the lower bound to what placement can reach.

    python -m tests.benchmarks.placement.even agents mixed --seeds 15

At every moment all workers have as much to do, each prompt finds cached whatever was computed before, and memory has
no end: a fluid, without requests that go anywhere. A turn still reads its own context by itself, so what it decodes
beside is an even share of all others'. Nobody knows how long an answer or a session will be: a router that keeps
sessions where they are cached, and is below this, has had luck.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tests.benchmarks.placement.generators import SCENARIOS
from tests.benchmarks.placement.workload import Episode
from tests.support.simulated.costs.gpu import GPUS, Gpu, gpu_named

#: Seconds between two moments; a tenth of it changes a makespan by less than one in a thousand.
MOMENT = 0.01
EVEN = [name for name, each in SCENARIOS.items() if not each.speeds and each.loses_at is None]


@dataclass(slots=True)
class _Playing:
    """An episode that has begun: the turn that it is at, the tokens of its context, and what is left of the answer."""

    episode: Episode
    turn: int = 0
    context: float = 0.0
    left: float = 0.0
    decodes_at: float = 0.0


class EvenFleet:
    """Workers that share everything."""

    def __init__(self, gpu: Gpu, workers: int) -> None:
        self._gpu = gpu
        self._workers = workers
        self._now = 0.0
        self._prefill = 0.0  # seconds of one GPU that prompts still take, of which all workers do the same part
        self._groups: set[str] = set()

    def makespan(self, episodes: Sequence[Episode]) -> float:
        """Seconds from the first episode's beginning to the last one's end."""
        first = min(episode.at for episode in episodes)
        waiting = [(each.at - first, number, _Playing(each)) for number, each in enumerate(episodes)]
        heapq.heapify(waiting)
        answering: list[tuple[int, _Playing]] = []
        while waiting or answering:
            if not answering:
                self._now = max(self._now, waiting[0][0])
            while waiting and waiting[0][0] <= self._now:
                _, number, playing = heapq.heappop(waiting)
                self._ask(playing)
                answering.append((number, playing))
            self._advance([playing for _, playing in answering])
            for number, playing in answering:
                if not playing.left and playing.turn + 1 < len(playing.episode.turns):
                    back = self._now + playing.episode.turns[playing.turn].tool_wait_s
                    heapq.heappush(waiting, (back, number, playing))
            answering = [each for each in answering if each[1].left]
        return self._now

    def _ask(self, playing: _Playing) -> None:
        """Its next turn begins; what others of its group share is computed by the first of them."""
        episode = playing.episode
        if playing.context:
            known, new = round(playing.context), episode.turns[playing.turn].append_tokens + 1
            playing.turn += 1
        else:
            known = min(episode.shared_prefix, episode.prompt - 1) if episode.group in self._groups else 0
            new = episode.prompt - known
            self._groups.add(episode.group)
        seconds = self._gpu.prefill_seconds([(new, known)])
        self._prefill += seconds
        playing.decodes_at = self._now + seconds
        playing.context = known + new
        # The prefill says the first token. Of one that says no more the prefill is all.
        playing.left = max(playing.episode.turns[playing.turn].output_tokens - 1, 1e-9)

    def _advance(self, answering: Sequence[_Playing]) -> None:
        """A moment passes."""
        gpu, workers = self._gpu, self._workers
        room = workers * MOMENT
        decoding = MOMENT * (1 - min(1.0, self._prefill / room))
        self._prefill = max(0.0, self._prefill - room)
        self._now += MOMENT
        others = (len(answering) - 1) / workers
        share = sum(each.context for each in answering) / workers
        alike = gpu.decode_s + gpu.decode_sequence_s * (1 + others) + gpu.decode_context_s * share
        own = gpu.decode_context_s * (1 - 1 / workers)
        for each in answering:
            if each.decodes_at < self._now:
                said = min(each.left, decoding / (alike + own * each.context))
                each.left -= said
                each.context += said


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="+", choices=EVEN)
    parser.add_argument("--seeds", type=int, default=5, help="of each (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=8, help="of the fleet (default: %(default)s)")
    parser.add_argument("--gpu", choices=sorted(GPUS), default="qwen3-8b-h100", help="(default: %(default)s)")
    options = parser.parse_args(argv)
    if options.seeds < 1 or options.workers < 1:
        parser.error("--seeds and --workers must be at least 1")
    return options


def main() -> int:
    options = arguments()
    gpu = gpu_named(options.gpu)
    for name in options.workload:
        took = []
        for seed in range(options.seeds):
            took.append(EvenFleet(gpu, options.workers).makespan(SCENARIOS[name].episodes(seed)))
            print(f"{name} seed {seed}: {took[-1]:.1f} s", file=sys.stderr, flush=True)
        median, mean = statistics.median(took), statistics.mean(took)
        print(f"{name}: median {median:.1f} s, mean {mean:.1f} s, {min(took):.1f} to {max(took):.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
