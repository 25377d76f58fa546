"""One half of a prefill/decode pair without a GPU: mooncake over TCP, and stand-ins for the CUDA events and streams
that SGLang's transfer asks for unasked. A flag of ours: `--transfer-parts DIRECTORY` (`environment.transfer_parts`)."""

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

PACKAGES, LIBRARIES = "packages", "libraries"  # as `environment.py` names them, which needs no torch
#: Of Debian's packages, in the order in which they need each other. Nothing here uses what they do.
NEEDED = ("libnl-3.so.200", "libnl-route-3.so.200", "libibverbs.so.1", "librdmacm.so.1")


class NoEvent:
    """A CUDA event that has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is needed."""

    def record(self, *args: Any, **kwargs: Any) -> None:
        """There is no stream."""

    wait = synchronize = record

    def query(self) -> bool:
        """It has happened."""
        return True


def install(parts: Path) -> None:
    """Make the transfer possible in this process and in those that it forks."""
    import torch

    os.environ["MOONCAKE_PROTOCOL"] = "tcp"
    for name in NEEDED:
        found = next((parts / LIBRARIES).rglob(name), None)
        ctypes.CDLL(str(found or name), mode=ctypes.RTLD_GLOBAL)
    sys.path.insert(0, str(parts / PACKAGES))
    torch.cuda.Event = NoEvent
    torch.cuda.current_stream = lambda *args, **kwargs: None
