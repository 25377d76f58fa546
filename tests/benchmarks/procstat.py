"""CPU time and peak memory of a process and all its descendants, read from /proc (Linux)."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")


def _fields(pid: int) -> list[str] | None:
    """/proc/PID/stat after the command name, which may itself hold spaces; None once the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def tree(root: int) -> list[int]:
    """`root` and every living descendant of it."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _fields(int(entry))) is not None:
            children.setdefault(int(fields[1]), []).append(int(entry))
    found = [root]
    for pid in found:  # grows while it is walked
        found.extend(children.get(pid, []))
    return found


def cpu_seconds(root: int) -> float:
    """User plus system time spent so far by the living processes of the tree; resolution 10 ms on most kernels."""
    # Ended threads are included by the kernel; ended children are not, and no peer here replaces its workers.
    ticks = sum(int(fields[11]) + int(fields[12]) for pid in tree(root) if (fields := _fields(pid)) is not None)
    return ticks / TICK


def scheduled_seconds(root: int) -> float:
    """The same of living threads alone, and to the nanosecond (`schedstat`)."""
    nanoseconds = 0
    for pid in tree(root):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                nanoseconds += int((task / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


def machine_busy_seconds() -> float:
    """CPU time that all processes of the machine, and a hypervisor's other guests, have taken so far."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / TICK


def own_seconds() -> float:
    """CPU time of this process, of its descendants, and of its children that have ended."""
    times = os.times()
    return cpu_seconds(os.getpid()) + times.children_user + times.children_system


def peak_rss_mb(root: int) -> float:
    """Sum of the peak resident sizes in the tree, in MB; pages shared between processes count once for each."""
    total = 0
    for pid in tree(root):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    return total * 1024 / 1e6


def resident_bytes() -> int:
    """Memory that this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
