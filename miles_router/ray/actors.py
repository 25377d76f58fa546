"""The actors: one for the control plane, one for each machine. Each runs its part in a process beside it."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from miles_router.cluster.nodes.machines import Machine, Machines
from miles_router.errors import ConfigError
from miles_router.ray.part import PORT, REFUSAL, Supervision, run
from miles_router.settings.config import RouterConfig

#: Seconds between two looks at the part, and at where the control plane is.
LOOK = 0.2
#: Seconds for which a machine waits for an answer of the control actor.
PATIENCE = 10.0


class Running:
    """A part that runs. When it ends, so does the actor, and Ray starts that again."""

    def __init__(self, config: RouterConfig, args: Namespace | None, what: Machine | Machines) -> None:
        self.host: str = ray.util.get_node_ip_address()
        self._directory = Path(tempfile.mkdtemp(prefix="miles-router-ray-"))
        if isinstance(what, Machine):
            what = replace(what, host=_bracketed(self.host), control=self._directory / "control")
        self._process = run(Supervision(config, args, what, os.getpid(), self._directory))
        self._ends = False
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()

    def _watch(self) -> None:
        while self._process.poll() is None:
            time.sleep(LOOK)
        if not self._ends and not (self._directory / REFUSAL).exists():
            os._exit(1)

    def address(self) -> tuple[str, int] | None:
        """Where it listens, once it does.

        Raises:
            ConfigError: it cannot be started.
        """
        refusal, port = self._directory / REFUSAL, self._directory / PORT
        if refusal.exists():
            raise ConfigError(refusal.read_text(encoding="utf-8"))
        return (_bracketed(self.host), int(port.read_text(encoding="ascii"))) if port.exists() else None

    def node(self) -> str:
        """Ray's id of the machine that it is on."""
        found: str = ray.get_runtime_context().get_node_id()
        return found

    def pid(self) -> int:
        """The number of its process."""
        return self._process.pid

    def stop(self) -> None:
        """End it in order; returns when it has ended."""
        self._ends = True
        self._process.terminate()
        self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


class ControlActor(Running):
    """Runs the control plane. Its state comes from the machines and the state directory, whenever it is started."""

    def __init__(self, config: RouterConfig, args: Namespace | None, machines: Machines) -> None:
        super().__init__(replace(config, port=0), args, machines)


class NodeActor(Running):
    """Runs one machine's processes, and keeps them told where the control plane is."""

    def __init__(
        self, config: RouterConfig, args: Namespace | None, machines: Machines, index: int, control: Any
    ) -> None:
        super().__init__(config, args, Machine(machines, index, secrets.token_hex(8), "", Path()))
        self._control = control
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        told = ""
        while not self._ends:
            try:
                address = ray.get(self._control.address.remote(), timeout=PATIENCE)
            except ray.exceptions.RayError:  # it is being started again
                address = None
            if address is not None and (now := f"{address[0]}:{address[1]}") != told:
                beside = self._directory / "control.new"
                beside.write_text(now, encoding="ascii")
                os.replace(beside, self._directory / "control")
                told = now
            time.sleep(LOOK if not told else 5 * LOOK)


def _bracketed(host: str) -> str:
    try:
        socket.inet_pton(socket.AF_INET6, host)
    except OSError:
        return host
    return f"[{host}]"
