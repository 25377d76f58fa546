"""Start a real SGLang worker on a CPU: `python launch_worker.py --model-path DIR --port N [any SGLang flag]`.

SGLang's HTTP server, tokenizer manager, scheduler, radix cache, sampler and protocol run as they are. Only what a
machine without a GPU lacks is taken out of the way, in every process SGLang spawns (each re-imports this file as
`__mp_main__`): compiled packages, pinned host memory and the registration of host memory with CUDA.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # nothing here is worth the time and the compiler it would take
sys.path.insert(0, str(Path(__file__).resolve().parent / "shims"))

import stand_ins  # noqa: E402

stand_ins.install()

import torch  # noqa: E402

CPU_FLAGS = [
    *("--device", "cpu"),
    *("--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch"),
    *("--cuda-graph-backend-decode", "disabled"),
    *("--cuda-graph-backend-prefill", "disabled"),
    *("--mem-fraction-static", "0.1"),
    *("--max-total-tokens", "16384"),
]


def unpinned(allocate):
    """`torch.empty` and `torch.zeros` without `pin_memory`, which needs a CUDA driver."""

    def allocate_unpinned(*args, **kwargs):
        kwargs.pop("pin_memory", None)
        return allocate(*args, **kwargs)

    return allocate_unpinned


def allow_unpinned_host_memory() -> None:
    import sglang.srt.mem_cache.pool_host.common as pool_host

    pool_host._cuda_host_register = lambda *args, **kwargs: None
    torch.empty, torch.zeros = unpinned(torch.empty), unpinned(torch.zeros)


allow_unpinned_host_memory()

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(CPU_FLAGS + sys.argv[1:]))
