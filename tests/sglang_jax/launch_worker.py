"""Starts SGLang-Jax on a CPU: `SGLANG_JAX_SRC=FOLDER PYTHON launch_worker.py --model-path DIR --port N [flags]`.

Only `pathwaysutils` is a stand-in, which its scheduler imports and uses with JAX_PLATFORMS=proxy alone. Processes that
it spawns import this file again."""

from __future__ import annotations

import os
import sys
import types

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, os.environ["SGLANG_JAX_SRC"])
sys.modules.setdefault("pathwaysutils", types.ModuleType("pathwaysutils"))

FLAGS = [
    *("--device", "cpu", "--dtype", "float32", "--mem-fraction-static", "0.1", "--page-size", "16"),
    *("--skip-server-warmup", "--disable-precompile"),
    *("--max-total-tokens", "4096", "--context-length", "1024"),
    *("--chunked-prefill-size", "512", "--max-prefill-tokens", "512"),
    *("--precompile-bs-paddings", "4", "--precompile-token-paddings", "64", "512"),
]


def main() -> None:
    from sgl_jax.srt.entrypoints import http_server
    from sgl_jax.srt.server_args import ServerArgs
    from sgl_jax.srt.utils import kill_process_tree

    try:
        sys.argv[1:] = [*FLAGS, *sys.argv[1:]]
        http_server.launch(ServerArgs.from_cli())
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
