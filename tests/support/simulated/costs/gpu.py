"""The costs of one model on one GPU: seconds of prefill and decode, and memory for the KV cache.

`QWEN3_8B_H100` is Qwen3-8B in bfloat16 on one H100 80 GB SXM. Its seconds are least-squares fits, in relative error,
to a public data set: github.com/tgarg01/silybench-data (CC BY 4.0), run 20260924T125045Z_h100-80gbx1_qwen3-8b_bf16,
`derived/csv/perf_points.csv`, a closed loop of 1 to 256 users with fixed lengths.

- decode: median time between tokens, 30 points of 1 to 256 sequences with 192 to 8,448 tokens each, up to 16 at the
  longest, before requests queued. The fit is within 5.5 % of each, 1.8 % in the mean square. The price of a token in
  context agrees with the hardware: 147,456 bytes of KV cache (36 layers x 8 heads x 128 x 2 x 2 bytes) over 3.35 TB/s
  take 44 ns, the fit has 50.
- prefill: time to the first token (95th percentile) of one user with 128, 1,024, 2,048 and 8,192 tokens, within 2 %.
- `kv_tokens` is the KV cache size of that run.

That run was vLLM 0.30. SGLang 0.5.3 takes the same within 2 % where both were published: 7.04 ms between tokens with 4
users of about 230 tokens in and 220 out (github.com/gpustack/gpustack, docs/performance-lab/qwen3-8b/h100-latency.md);
the fit has 6.94. Batches are formed as in SGLang 0.5.23, with its defaults for this GPU (`Schedule`).

`QWEN3_30B_A3B_H100` has the shape of Qwen3-30B-A3B with random bfloat16 weights on one H100 80 GB, SGLang 0.5.23 with
Triton attention and CUDA graphs for prefill. `python -m tests.gpu.fit` computes its prices from
`tests/gpu/data/cost.json` and prints their errors. A linear model fits a mixture of experts badly: a batch of one reads
8 experts per layer, a batch of 64 nearly all 128. The fit covers 8 to 128 sequences, within 23 %, 14 % in the mean
square. Smaller batches take less than the fit, a single short sequence a third of it. `kv_tokens` is the engine's
`max_total_num_tokens`, with `--mem-fraction-static 0.84`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Gpu:
    """The prices of a model on a GPU in seconds, and its sizes in tokens.

    A prefill batch costs `prefill_s`, plus for each part `prefill_token_s` per token and `prefill_pair_s` per pair of a
    token and an earlier one. A decode step costs `decode_s`, plus `decode_sequence_s` per sequence and
    `decode_context_s` per token in the sequences' contexts.
    """

    prefill_s: float
    prefill_token_s: float
    prefill_pair_s: float
    decode_s: float
    decode_sequence_s: float
    decode_context_s: float
    kv_tokens: int
    chunk_tokens: int = 8192
    """SGLang's `chunked_prefill_size` for a GPU of 80 GB."""
    max_running: int = 4096
    """SGLang's `max_running_requests`: 512 for each full context that fits `kv_tokens`, bounded to 2,048 to 4,096."""
    page_tokens: int = 1
    """SGLang's `page_size`: the prefix cache stores whole pages."""

    def scaled(self, factor: float) -> Gpu:
        """Return a GPU that is `factor` times as fast, with the same memory.

        Raises:
            ValueError: the factor is not above 0.
        """
        if not factor > 0:
            raise ValueError(f"a GPU's speed must be above 0, got {factor}")
        return replace(
            self,
            prefill_s=self.prefill_s / factor,
            prefill_token_s=self.prefill_token_s / factor,
            prefill_pair_s=self.prefill_pair_s / factor,
            decode_s=self.decode_s / factor,
            decode_sequence_s=self.decode_sequence_s / factor,
            decode_context_s=self.decode_context_s / factor,
        )

    def prefill_seconds(self, parts: Iterable[tuple[int, int]]) -> float:
        """Return the seconds of one prefill batch.

        Args:
            parts: pairs of how many tokens are computed, and how many tokens of the sequence come before them.
        """
        seconds = self.prefill_s
        for tokens, before in parts:
            pairs = tokens * before + tokens * tokens / 2
            seconds += tokens * self.prefill_token_s + pairs * self.prefill_pair_s
        return seconds

    def decode_seconds(self, steps: int, sequences: int, context: int) -> float:
        """Return the seconds of `steps` decode steps of a batch. Its sequences have `context` tokens together at the
        first step, and each grows by one per step."""
        growth = self.decode_context_s * sequences
        return steps * self._first_step(sequences, context) + growth * steps * (steps - 1) / 2

    def decode_steps(self, seconds: float, sequences: int, context: int) -> int:
        """Return how many decode steps of such a batch end within `seconds`; the inverse of `decode_seconds`."""
        first, growth = self._first_step(sequences, context), self.decode_context_s * sequences
        # steps * first + growth * steps * (steps - 1) / 2 = seconds
        linear = first - growth / 2
        root = (math.sqrt(linear * linear + 2 * growth * seconds) - linear) / growth if growth else seconds / first
        steps = max(0, math.floor(root))
        # The root is inexact: correct it so that it agrees with `decode_seconds`.
        while self.decode_seconds(steps + 1, sequences, context) <= seconds:
            steps += 1
        while steps and self.decode_seconds(steps, sequences, context) > seconds:
            steps -= 1
        return steps

    def _first_step(self, sequences: int, context: int) -> float:
        return self.decode_s + sequences * self.decode_sequence_s + context * self.decode_context_s


QWEN3_8B_H100 = Gpu(
    prefill_s=11.3e-3,
    prefill_token_s=22.06e-6,
    prefill_pair_s=1.861e-9,
    decode_s=6.824e-3,
    decode_sequence_s=11.68e-6,
    decode_context_s=49.66e-9,
    kv_tokens=377_024,
)

QWEN3_30B_A3B_H100 = Gpu(
    prefill_s=33.01e-3,
    prefill_token_s=10.27e-6,
    prefill_pair_s=4.747e-9,
    decode_s=12.12e-3,
    decode_sequence_s=122.6e-6,
    decode_context_s=73.52e-9,
    kv_tokens=98_498,
    max_running=2048,
)

#: The GPUs by their names in the placement benchmark's `--gpu`.
GPUS = {"qwen3-8b-h100": QWEN3_8B_H100, "qwen3-30b-a3b-h100": QWEN3_30B_A3B_H100}


def gpu_named(name: str) -> Gpu:
    """Return the GPU with this name.

    Raises:
        ValueError: the name is unknown; the message lists the known ones.
    """
    if name not in GPUS:
        raise ValueError(f"no GPU is called {name!r}: {', '.join(sorted(GPUS))}")
    return GPUS[name]
