"""The trainer's side of a weight transfer: a process of its own with weights on the GPU that the worker has.

    python -m tests.gpu.sender --model DIRECTORY --url ROUTER [--bucket-mib 1024] [--device cuda]

For each line `{"seed": ..., "step": ...}` on its standard input it makes the weights of that policy on the GPU, sends
them bucket by bucket with `/update_weights_from_tensor`, and answers with a line that says how long that took. What
travels over HTTP are CUDA IPC handles; the worker copies out of this process's memory, as miles and slime do where
trainer and engine share GPUs. Runs in SGLang's own environment, with a worker of one GPU. With `--device cpu` the
tensors are in shared memory, for a worker without a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

from tests.gpu.model import Shape, Weight, buckets, read_shape

MIB = 1 << 20


@dataclass(frozen=True)
class Policy:
    """Weights: random numbers of `seed`, and on them others, `step` times as large."""

    seed: int
    step: float = 0.0


@dataclass
class Sent:
    """A transfer. `seconds` are all; `making` those in which the weights were made, which a trainer has."""

    bytes: int = 0
    buckets: int = 0
    seconds: float = 0.0
    making: float = 0.0


def send(url: str, shape: Shape, policy: Policy, bucket_bytes: int, device: str) -> Sent:
    """SGLang wants a transfer opened and closed.

    Raises:
        OSError: a step of it was refused.
    """
    sent, start = Sent(), time.monotonic()
    dice = torch.Generator(device).manual_seed(policy.seed)
    others = torch.Generator(device).manual_seed(policy.seed + 1_000_003)
    _post(f"{url}/begin_weight_update", {})
    for bucket in buckets(shape, bucket_bytes):
        begun = time.monotonic()
        flat, metadata = _fill(bucket, policy.step, dice, others)
        if device == "cuda":
            torch.cuda.synchronize()
        sent.making += time.monotonic() - begun
        named = MultiprocessingSerializer.serialize({"flattened_tensor": flat, "metadata": metadata}, output_str=True)
        body = {"serialized_named_tensors": [named], "load_format": "flattened_bucket", "flush_cache": False}
        _post(f"{url}/update_weights_from_tensor", body)
        sent.bytes += flat.numel()
        sent.buckets += 1
        del flat
        if device == "cuda":
            torch.cuda.ipc_collect()
    _post(f"{url}/end_weight_update", {})
    sent.seconds = time.monotonic() - start
    return sent


def _fill(
    bucket: Sequence[Weight], step: float, dice: torch.Generator, others: torch.Generator
) -> tuple[torch.Tensor, list[FlattenedTensorMetadata]]:
    """One tensor of bytes that holds all of them, and where each is."""
    flat = torch.empty(sum(weight.bytes for weight in bucket), dtype=torch.uint8, device=dice.device)
    metadata, at = [], 0
    for weight in bucket:
        end = at + weight.bytes
        values = flat[at:end].view(torch.bfloat16)
        values.normal_(weight.mean, weight.deviation, generator=dice)
        if step:
            values.add_(torch.empty_like(values).normal_(0.0, step * weight.deviation, generator=others))
        metadata.append(
            FlattenedTensorMetadata(
                name=weight.name,
                shape=torch.Size(weight.shape),
                dtype=torch.bfloat16,
                start_idx=at,
                end_idx=end,
                numel=weight.bytes,
            )
        )
        at = end
    return flat, metadata


def _post(url: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=600) as reply:
            reply.read()
    except urllib.error.HTTPError as error:
        raise OSError(f"{url}: {error.read().decode()}") from error


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.sender", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--bucket-mib", type=int, default=1024)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        monkey_patch_torch_reductions()  # a handle names its GPU by UUID, as the worker reads it
    else:
        torch.multiprocessing.set_sharing_strategy("file_system")
    shape = read_shape(arguments.model)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        policy = Policy(**json.loads(line))
        sent = send(arguments.url, shape, policy, arguments.bucket_mib * MIB, arguments.device)
        print(json.dumps(asdict(sent)), flush=True)


if __name__ == "__main__":
    main()
