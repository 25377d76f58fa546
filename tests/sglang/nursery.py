"""Imports SGLang once and forks a worker for every line on its standard input: most of a start is importing.

A line is `{"flags": [...], "environment": {...}, "log": PATH, "scratch": DIRECTORY}`; the answer on standard output is
the worker's process id, which is also its process group. Workers end when this process ends, and it ends when its
standard input does.
"""

import ctypes
import gc
import json
import os
import random
import signal
import sys
import tempfile
from typing import Any

import launch_worker

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def keep_stdout() -> int:
    """A descriptor of standard output that is ours alone; what libraries print goes to standard error."""
    kept = os.dup(1)
    os.dup2(2, 1)
    return kept


def become_worker(order: dict[str, Any]) -> None:
    import numpy

    os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor, target in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
        os.dup2(descriptor, target)
    os.environ.update(order["environment"])
    os.environ["TMPDIR"] = tempfile.tempdir = order["scratch"]
    # A forked generator repeats its twin's numbers, and SGLang draws its sampling seed and ports from it.
    random.seed()
    numpy.random.seed()
    launch_worker.serve(order["flags"])


def main() -> None:
    answers = keep_stdout()
    # What a killed worker leaves behind comes to this process, which need not wait for it.
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    gc.set_threshold(100_000, 20, 20)  # importing and reading tokenizers makes millions of objects and no garbage
    launch_worker.prepare()
    launch_worker.preload()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            os.close(answers)
            become_worker(json.loads(line))
            sys.exit()
        os.write(answers, f"{pid}\n".encode())


if __name__ == "__main__":
    main()
