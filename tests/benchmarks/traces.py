"""What traces cost the router: CPU time of a small request with `--otel` and without it, of the whole process, the
exporter's thread included.

    python -m tests.benchmarks.traces [--quick] [--repeat 12] [--delay-ms 4]

A fast worker answers 133 bytes to each request of 1 kB, and a collector takes every span of every request. In each
round both routers are started anew, and asked in turn for a twentieth of a second each, so that what else the machine
does hits both; the median over the rounds is told. With `--delay-ms` each of the 8 connections pauses between its
requests, so that routers are not busy all the time.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles

from tests.benchmarks.backend import nginx_head, running_backend
from tests.benchmarks.load import WRK_SCRIPT, request_body
from tests.benchmarks.peers import running_router
from tests.benchmarks.process import HOST, free_port, started
from tests.benchmarks.procstat import scheduled_seconds
from tests.benchmarks.report import environment, number, table

OFF, ON = "off", "on"
CONNECTIONS = 8
#: Seconds for which one router is asked before the next one is.
MOMENT = 0.05
COLLECTOR = """    server {{
        listen {host}:{port};
        client_max_body_size 64m;
        location / {{ return 200; }}
    }}
}}
"""


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
def load(port: int, script: Path, seconds: int) -> Iterator[subprocess.Popen[str]]:
    """What asks a router for so many seconds of the clock, once it may."""
    command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "-s", str(script), f"http://{HOST}:{port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        process.send_signal(signal.SIGSTOP)
        try:
            yield process
        finally:
            process.kill()


def answers(process: subprocess.Popen[str]) -> int:
    """How many it was given, once it is done."""
    output, _ = process.communicate()
    found = output.partition('RESULT {"requests": ')[2].partition(",")[0]
    assert found, output
    assert '"bad": 0' in output, output
    return int(found)


def alternating(routers: dict[str, tuple[int, int]], script: Path, seconds: float) -> dict[str, float]:
    """Microseconds of CPU for a request to each router: each is asked for a moment, in turn, for so long in all."""
    total = round(seconds * len(routers)) + 1
    with contextlib.ExitStack() as stack:
        loads = {name: stack.enter_context(load(port, script, total)) for name, (port, _) in routers.items()}
        before = {name: scheduled_seconds(pid) for name, (_, pid) in routers.items()}
        end = time.monotonic() + seconds * len(routers)
        there, back = [*loads.values()], [*loads.values()][::-1]
        for process in itertools.cycle([*there, *back]):
            process.send_signal(signal.SIGCONT)
            time.sleep(MOMENT)
            process.send_signal(signal.SIGSTOP)
            if time.monotonic() > end:
                break
        for process in loads.values():
            process.send_signal(signal.SIGCONT)
        done = {name: answers(process) for name, process in loads.items()}
    return {name: (scheduled_seconds(pid) - before[name]) / done[name] * 1e6 for name, (_, pid) in routers.items()}


def spans_sent(port: int) -> dict[str, int]:
    """How many spans of a router have ended, and what has become of them."""
    done = subprocess.run(["curl", "-s", f"http://{HOST}:{port}/metrics"], capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("miles_router_trace_")]
    return {line.partition('"')[2].partition('"')[0] or "ended": int(float(line.rpartition(" ")[2])) for line in lines}


def measured(options: argparse.Namespace) -> tuple[dict[str, list[float]], Counter[str]]:
    """Microseconds of CPU by router, one for each round; and what became of the spans."""
    spent: dict[str, list[float]] = {OFF: [], ON: []}
    outcomes: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="traces-")))
        worker = stack.enter_context(running_backend(root / "backend")).ports["small"]
        collected_at = stack.enter_context(collector(root / "collector"))
        exporter = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{HOST}:{collected_at}"}
        script = root / "load.lua"
        pause = f"function delay() return {options.delay_ms} end\n" if options.delay_ms else ""
        script.write_text(WRK_SCRIPT % request_body(False).decode() + pause)
        for turn in range(options.repeat):
            with contextlib.ExitStack() as started_now:  # where a process has its memory makes a difference of percents
                routers = {}
                for name in spent:
                    running = running_router(worker, root / name, *(["--otel"] if name == ON else []), **exporter)
                    routers[name] = started_now.enter_context(running)
                alternating(routers, script, 1.0)
                for name, each in alternating(routers, script, options.seconds).items():
                    spent[name].append(each)
                outcomes.update(spans_sent(routers[ON][0]))
            print(f"\r{turn + 1}/{options.repeat} rounds", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return spent, outcomes


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three rounds of 1 s: a smoke test")
    parser.add_argument("--repeat", type=int, default=12, help="rounds (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each router in a round (default: %(default)s)")
    parser.add_argument("--delay-ms", type=int, default=0, help="between the requests of a connection (default: none)")
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
    costs = [a / b - 1 for a, b in zip(spent[ON], spent[OFF], strict=True)]
    low, cost, high = quantiles(costs, n=4)
    print(f"traces cost {cost:.1%} of a small request's CPU time; in half of the rounds {low:.1%} to {high:.1%}")


if __name__ == "__main__":
    main()
