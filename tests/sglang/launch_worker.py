"""Start a real SGLang worker on a CPU: `python launch_worker.py --model-path DIR --port N [any SGLang flag]`.

SGLang's HTTP server, tokenizer manager, scheduler, radix cache, sampler and protocol run as they are. Only what a
machine without a GPU lacks is taken out of the way (compiled packages, pinned host memory, the registration of host
memory with CUDA), and its processes are forked instead of spawned, because importing SGLang takes each of them 8 s.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import scripted_sampling
import transfer

sys.path.insert(0, str(Path(__file__).resolve().parent / "shims"))

#: Our own flags: what the worker is to say (`scripted_sampling.py`), and what carries keys and values (`transfer.py`).
SCRIPT, TRANSFER = "--script-file", "--transfer-parts"

CPU_FLAGS = [
    *("--device", "cpu"),
    *("--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch"),
    *("--cuda-graph-backend-decode", "disabled"),
    *("--cuda-graph-backend-prefill", "disabled"),
    # A worker does not start where others take more than this share of the free memory while it does; it is not taken.
    *("--mem-fraction-static", "0.9"),
    *("--max-total-tokens", "65536"),  # 32 MB; an agent's whole session stays in the prefix cache
    *("--max-running-requests", "256"),  # each reserves a table as long as the context
]


def prepare() -> None:
    """Makes this process able to import and run SGLang; before anything imports torch."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # nothing here is worth a C++ compiler's time
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # more spin, and on busy cores a token then takes ten times as long
    import stand_ins

    stand_ins.install()
    allow_unpinned_host_memory()
    fork_instead_of_spawn()


def allow_unpinned_host_memory() -> None:
    import sglang.srt.mem_cache.pool_host.common as pool_host
    import torch

    pool_host._cuda_host_register = lambda *args, **kwargs: None
    torch.empty, torch.zeros = unpinned(torch.empty), unpinned(torch.zeros)


def unpinned(allocate: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.empty` and `torch.zeros` without `pin_memory`, which needs a CUDA driver."""

    def allocate_unpinned(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return allocate(*args, **kwargs)

    return allocate_unpinned


def allow_adapters() -> None:
    """SGLang's LoRA pins memory in more ways, and makes CUDA's events and streams, which do nothing here."""
    import torch

    class Event:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def record(self, *_: Any, **__: Any) -> None:
            pass

        wait = synchronize = record

        def query(self) -> bool:
            return True

    torch.cuda.Event, torch.cuda.current_stream = Event, lambda *args, **kwargs: None
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    for name in ("tensor", "ones", "full", "empty_like", "zeros_like", "arange"):
        setattr(torch, name, unpinned(getattr(torch, name)))


def fork_instead_of_spawn() -> None:
    """SGLang insists on `spawn` for CUDA's sake. It makes its processes before it starts threads, so fork is safe."""
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *args, **kwargs: None


def preload() -> None:
    """Imports what a worker needs, so that processes forked from this one share it."""
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.scheduler
    import sglang.srt.managers.tp_worker  # noqa: F401
    from sglang.srt.models.registry import ModelRegistry

    ModelRegistry.get_supported_archs()


def serve(flags: Sequence[str]) -> None:
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    flags = list(flags)
    for name, install in ((SCRIPT, scripted_sampling.install), (TRANSFER, transfer.install)):
        if name in flags:
            at = flags.index(name)
            install(Path(flags[at + 1]))
            del flags[at : at + 2]
    if "--enable-lora" in flags:
        allow_adapters()
    run_server(prepare_server_args([*CPU_FLAGS, *flags]))


if __name__ == "__main__":
    prepare()
    preload()
    serve(sys.argv[1:])
