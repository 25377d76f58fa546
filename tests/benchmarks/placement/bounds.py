"""What no router can beat: the longest episode alone, and all work spread over all workers."""

from __future__ import annotations

from collections.abc import Sequence

from tests.benchmarks.placement.workload import Episode
from tests.support.simulated.costs.gpu import Gpu


def lower_bound(episodes: Sequence[Episode], gpu: Gpu, speeds: Sequence[float]) -> float:
    """Seconds that the makespan cannot fall short of on workers so fast, whatever is placed where."""
    first = min(episode.at for episode in episodes)
    longest = max(episode.at - first + alone(episode, gpu) / max(speeds) + _waits(episode) for episode in episodes)
    return max(longest, work(episodes, gpu) / sum(speeds))


def alone(episode: Episode, gpu: Gpu) -> float:
    """Seconds that an episode computes when it has a GPU for itself, and all that it repeats is cached."""
    seconds, known, new = 0.0, 0, episode.prompt
    for turn in episode.turns:
        if not known:
            # The others of its group may have computed what they share.
            known = min(episode.shared_prefix, episode.prompt - 1)
            new = episode.prompt - known
        seconds += gpu.prefill_seconds([(new, known)])
        seconds += gpu.decode_seconds(turn.output_tokens - 1, 1, known + new + 1)
        known += new + turn.output_tokens - 1
        new = turn.append_tokens + 1
    return seconds


def work(episodes: Sequence[Episode], gpu: Gpu) -> float:
    """Seconds of GPU that all take at least: each token is computed once, each step is shared by as many sequences as
    memory has room for."""
    shared = {each.group: 0 for each in episodes}
    for each in episodes:
        shared[each.group] = max(shared[each.group], min(each.shared_prefix, each.prompt - 1))
    seconds = sum(_computed(gpu, tokens, 0) for tokens in shared.values())
    for episode in episodes:
        known = common = min(episode.shared_prefix, episode.prompt - 1)
        new = episode.prompt - known
        for turn in episode.turns:
            seconds += _computed(gpu, new, known)
            steps = turn.output_tokens - 1
            contexts = steps * (known + new + 1) + steps * (steps - 1) / 2
            seconds += steps * gpu.decode_sequence_s + contexts * gpu.decode_context_s
            seconds += (contexts - steps * common) / gpu.kv_tokens * gpu.decode_s
            known += new + steps
            new = turn.append_tokens + 1
    return seconds


def _waits(episode: Episode) -> float:
    return sum(turn.tool_wait_s for turn in episode.turns[:-1])


def _computed(gpu: Gpu, tokens: int, before: int) -> float:
    """Prefill without what each costs by itself, since one prefill may have many parts."""
    return gpu.prefill_seconds([(tokens, before)]) - gpu.prefill_s
