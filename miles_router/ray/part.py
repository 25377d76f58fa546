"""What an actor runs beside itself: the supervisor of one machine's processes, or of the control plane. It ends with
the actor, however that comes."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from miles_router import log
from miles_router.cluster.nodes.machines import Machine, Machines
from miles_router.errors import ConfigError
from miles_router.serving.process import end_with
from miles_router.serving.supervisor import supervise
from miles_router.settings.config import RouterConfig

#: Run by a new interpreter: where modules are, then the part.
START = (
    "import pickle, sys; given = sys.stdin.buffer; sys.path[:] = pickle.load(given); "
    "from miles_router.ray.part import main; main(pickle.load(given))"
)
#: Names in its directory: where it listens, once it does; and why it cannot be started.
PORT, REFUSAL = "port", "refusal"


@dataclass(frozen=True)
class Supervision:
    """A supervisor's work.

    Attributes:
        parent: the number of the process that starts it.
        directory: where it says where it listens.
    """

    config: RouterConfig
    args: Namespace | None
    what: Machine | Machines
    parent: int
    directory: Path


def run(part: Supervision) -> subprocess.Popen[bytes]:
    """Start it."""
    process = subprocess.Popen([sys.executable, "-c", START], stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    with process.stdin:
        process.stdin.write(pickle.dumps(sys.path) + pickle.dumps(part))
    return process


def main(part: Supervision) -> None:
    """Supervise until SIGTERM."""
    end_with(part.parent)
    log.configure(part.config.log_level, part.config.log_format)

    def listening(port: int) -> None:
        _write(part.directory / PORT, str(port))

    try:
        supervise(part.config, part.args, part.what, listening)
    except ConfigError as error:
        _write(part.directory / REFUSAL, str(error))
        sys.exit(2)
    finally:
        log.flush()


def _write(path: Path, text: str) -> None:
    """Whole, or not at all."""
    beside = path.with_suffix(".new")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
