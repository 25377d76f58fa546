"""What traces cost the router: CPU time of a small request with `--otel` and without it, of the whole process, the
exporter's thread included.

    python -m tests.benchmarks.traces [--quick] [--repeat 15] [--against CHECKOUT]

A fast worker answers 133 bytes to each request of 1 kB, and a collector takes every span of every request. Both routers
run beside each other for the whole time and are asked in turn, so that what else the machine does hits both; the median
over the rounds is told. With `--against`, the router of another checkout is a third, which says what traces cost that
are off.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from tests.benchmarks.backend import nginx_head, running_backend
from tests.benchmarks.load import WRK_SCRIPT, request_body
from tests.benchmarks.peers import REPO
from tests.benchmarks.process import HOST, free_port, started
from tests.benchmarks.report import environment, number, table

OFF, ON, BEFORE = "off", "on", "before"
CONNECTIONS = 8
COLLECTOR = """    server {{
        listen {host}:{port};
        client_max_body_size 64m;
        location / {{ return 200; }}
    }}
}}
"""


def scheduled_seconds(pid: int) -> float:
    """CPU time of a process, all its threads, in nanoseconds' resolution where the kernel has it."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


@contextlib.contextmanager
def collector(root: Path) -> Iterator[int]:
    """A server that takes whatever it is sent; its port."""
    port = free_port()
    root.mkdir()
    config = root / "collector.conf"
    config.write_text(nginx_head(root) + COLLECTOR.format(host=HOST, port=port))
    with started(["nginx", "-p", str(root), "-c", str(config)], port, "/", root / "log"):
        yield port


@contextlib.contextmanager
def router(source: Path, worker: int, collected_at: int, log: Path, *options: str) -> Iterator[tuple[int, int]]:
    """A router of a checkout: its port and its process id."""
    port = free_port()
    command = [sys.executable, "-m", "miles_router", "--port", str(port), "--worker-urls", f"http://{HOST}:{worker}"]
    exporter = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{HOST}:{collected_at}"}
    env = {**os.environ, **exporter, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    with started([*command, "--log-level", "warning", *options], port, "/readiness", log, env, source) as pid:
        yield port, pid


def load(port: int, seconds: float, script: Path) -> int:
    """Ask for so long; how many answers there were."""
    command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{max(1, round(seconds))}s", "-s", str(script)]
    output = subprocess.run(
        [*command, f"http://{HOST}:{port}"], capture_output=True, text=True, timeout=seconds + 60, check=True
    ).stdout
    found = output.partition('RESULT {"requests": ')[2].partition(",")[0]
    assert found, output
    assert '"bad": 0' in output, output
    return int(found)


def spans_sent(port: int) -> dict[str, float]:
    """What has become of a router's spans."""
    done = subprocess.run(["curl", "-s", f"http://{HOST}:{port}/metrics"], capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("miles_router_trace_records_total{")]
    return {line.partition('"')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines}


def measured(options: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Microseconds of CPU by router, one for each round; and what became of the spans."""
    sources = {OFF: REPO, ON: REPO, **({BEFORE: options.against.resolve()} if options.against else {})}
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="traces-")))
        worker = stack.enter_context(running_backend(root / "backend")).ports["small"]
        collected_at = stack.enter_context(collector(root / "collector"))
        script = root / "load.lua"
        script.write_text(WRK_SCRIPT % request_body(False).decode())
        routers = {
            name: stack.enter_context(
                router(source, worker, collected_at, root / name, *(["--otel", "true"] if name == ON else []))
            )
            for name, source in sources.items()
        }
        for port, _ in routers.values():
            load(port, 1, script)
        spent: dict[str, list[float]] = {name: [] for name in routers}
        for turn in range(options.repeat):
            names = [*routers][turn % len(routers) :] + [*routers][: turn % len(routers)]
            for name in names:
                port, pid = routers[name]
                before = scheduled_seconds(pid)
                done = load(port, options.seconds, script)
                spent[name].append((scheduled_seconds(pid) - before) / done * 1e6)
            print(f"\r{turn + 1}/{options.repeat} rounds", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        return spent, spans_sent(routers[ON][0])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three rounds of 1 s: a smoke test")
    parser.add_argument("--repeat", type=int, default=15, help="rounds (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each router in a round (default: %(default)s)")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="measure its router too")
    parser.add_argument("--markdown", action="store_true", help="print the table as GitHub markdown")
    options = parser.parse_args()
    if options.quick:
        options.repeat, options.seconds = 3, 1.0
    return options


def main() -> None:
    options = arguments()
    for name, value in environment().items():
        print(f"{name}: {value}")
    spent, outcomes = measured(options)
    rows = [
        [name, number(median(each), 1), *(number(median(a / b for a, b in zip(each, spent[OFF], strict=True)), 3),)]
        for name, each in spent.items()
    ]
    print(table(["traces", "CPU us/request", "by that with none"], rows, options.markdown))
    print("spans: " + ", ".join(f"{count:,.0f} {name}" for name, count in outcomes.items()))
    cost = median(a / b for a, b in zip(spent[ON], spent[OFF], strict=True)) - 1
    print(f"traces cost {cost:.1%} of a small request's CPU time")


if __name__ == "__main__":
    main()
