"""A real SGLang that runs without a GPU: `python tests/sglang/environment.py` builds it if absent and says where it is.

Virtual environment and models live outside of the checkout, under `$MILES_ROUTER_CACHE` (default
`~/.cache/miles-router`), in directories named by a hash of the files that define them. A directory appears under that
name in one rename, when it is complete, so an interrupted build is never taken for a good one.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
NURSERY = HERE / "nursery.py"
OLDEST_PYTHON = (3, 11)  # the oldest that the pinned SGLang is built for


@dataclass(frozen=True)
class Environment:
    python: Path
    dense_model: Path
    moe_model: Path


def cache_root() -> Path:
    fallback = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "miles-router"
    return Path(os.environ.get("MILES_ROUTER_CACHE") or fallback).expanduser()


def say(message: str) -> None:
    print(f"[sglang environment] {message}", file=sys.stderr, flush=True)


def key(*parts: str | Path) -> str:
    """Names what is built by what defines it: the contents of files, and plain strings."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.read_bytes() if isinstance(part, Path) else part.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:12]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One builder at a time; the kernel lets go of the lock when its process ends, however it ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is building; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run(what: str, *command: str | Path) -> None:
    started = time.monotonic()
    say(f"{what} ...")
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{what} failed with status {done.returncode}:\n{done.stdout[-8000:]}")
    say(f"{what}: {time.monotonic() - started:.0f} s")


def built(final: Path, build: Callable[[Path], None]) -> Path:
    """`final`, made by `build` in a scratch directory beside it unless it is there already."""
    if final.exists():
        return final
    with locked(final.parent / f"{final.name}.lock"):
        if not final.exists():
            scratch = final.with_name(f"{final.name}.unfinished")
            shutil.rmtree(scratch, ignore_errors=True)
            build(scratch)
            scratch.rename(final)
    return final


def build_venv(directory: Path) -> None:
    python = directory / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off")
    say(f"building {directory} (about 1.6 GB, 2 minutes)")
    run("creating the virtual environment", sys.executable, "-m", "venv", directory)
    run("installing torch and what SGLang imports", *pip, "-r", HERE / "requirements.txt")
    run("installing SGLang", *pip, "--no-deps", "-r", HERE / "requirements-no-deps.txt")


def venv() -> Path:
    if sys.version_info < OLDEST_PYTHON:
        raise RuntimeError(f"SGLang's environment needs Python {'.'.join(map(str, OLDEST_PYTHON))} or later")
    requirements = (HERE / "requirements.txt", HERE / "requirements-no-deps.txt")
    name = key(*requirements, platform.python_version(), platform.machine())
    return built(cache_root() / f"sglang-{name}", build_venv) / "bin" / "python"


def package(requirement: str) -> Path:
    """A folder with a package alone, for what SGLang imports with few models only."""

    def build(directory: Path) -> None:
        pip = (sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps")
        run(f"fetching {requirement}", *pip, "--target", directory, requirement)

    return built(cache_root() / requirement.replace("==", "-"), build)


#: Where `transfer.py` finds what it needs.
TRANSFER_PACKAGES, TRANSFER_FILES = "packages", "libraries"
#: Debian packages of the libraries that the transfer engine is linked with.
TRANSFER_LIBRARIES = ("libibverbs1", "librdmacm1", "libnl-3-200", "libnl-route-3-200")


def build_transfer(python: Path, directory: Path) -> None:
    libraries = directory / TRANSFER_FILES
    libraries.mkdir(parents=True)
    pip = (python, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off", "--no-deps")
    wanted = ("-r", HERE / "requirements-transfer.txt")
    run("installing the transfer engine", *pip, "--target", directory / TRANSFER_PACKAGES, *wanted)
    fetch = f"cd '{libraries}' && apt-get download {' '.join(TRANSFER_LIBRARIES)}"
    unpack = f"cd '{libraries}' && for each in *.deb; do dpkg-deb -x $each . && rm $each; done"
    run("fetching its libraries", "sh", "-c", f"({fetch} || (apt-get -qq update && {fetch})) && {unpack}")


def transfer_parts() -> Path:
    """What the halves of a prefill/decode pair need besides (140 MB): needs Debian's `apt-get` and `dpkg-deb`."""
    python = venv()
    name = key(HERE / "requirements-transfer.txt", *TRANSFER_LIBRARIES, platform.python_version(), platform.machine())
    return built(cache_root() / f"transfer-{name}", lambda directory: build_transfer(python, directory))


def model(python: Path, kind: str, *flags: str) -> Path:
    def build(directory: Path) -> None:
        run(f"making the {kind} model", python, HERE / "make_model.py", directory, *flags)

    name = key(HERE / "make_model.py", HERE / "requirements.txt")
    return built(cache_root() / f"model-{kind}-{name}", build)


def ensure() -> Environment:
    python = venv()
    return Environment(python, dense_model=model(python, "dense"), moe_model=model(python, "moe", "--moe"))


def trained_model() -> Path:
    """SmolLM2-135M-Instruct in float32 (538 MB; 93 MB are fetched), for `make train`."""
    python = venv()

    def build(directory: Path) -> None:
        run("fetching and unpacking SmolLM2-135M-Instruct", python, HERE / "make_trained_model.py", directory)

    name = key(HERE / "make_trained_model.py", HERE / "requirements.txt")
    return built(cache_root() / f"model-trained-{name}", build)


if __name__ == "__main__":
    environment = ensure()
    print(f"python       {environment.python}")
    print(f"dense model  {environment.dense_model}")
    print(f"MoE model    {environment.moe_model}")
