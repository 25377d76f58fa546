"""What a test needs of the system: a mount of its own, and to trace a process. Where it may not, the test says so."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess

import pytest

#: A mount that ends with the process: root may have one, and others where user namespaces are allowed.
MOUNTS = ("unshare", "--mount") if os.geteuid() == 0 else ("unshare", "--user", "--map-root-user", "--mount")
STRACE = ("strace", "-D", "-f", "-y")


@functools.cache
def _works(*command: str) -> bool:
    return (
        shutil.which(command[0]) is not None
        and not subprocess.run(command, capture_output=True, check=False).returncode
    )


mounted = pytest.mark.skipif(
    not _works(*MOUNTS, "mount", "-t", "tmpfs", "none", "/mnt"), reason="this system lets nobody mount a small disk"
)
traced = pytest.mark.skipif(
    not _works("strace", "-o", os.devnull, "true"), reason="strace is absent, or may not trace here"
)
