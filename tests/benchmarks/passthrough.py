"""The router's passthrough against its peers, in front of the same fast worker, in one interleaved run.

    python tests/benchmarks/passthrough.py [--quick] [--repeat 3] [--only PEER ...] [--loads LOAD ...]
        [--against CHECKOUT]

`make bench` installs what it needs: nginx, wrk, and the gateways of others (sglang-router, smg, vllm-router) in an
environment of their own. A gateway that cannot be installed is named and left out. Uses 127.0.0.1 alone.
Absolute figures hold for one machine and one hour: read the ratios. A row with a single failed or altered answer is
reported as failed, so that errors cannot look fast.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.backend import Backend, running_backend
from tests.benchmarks.load import LOADS, Load, Sample, measure
from tests.benchmarks.peers import BEFORE, PEERS, Peer, other_checkout, peer_version, peers_python, running_peer
from tests.benchmarks.process import PeerError
from tests.benchmarks.report import environment, render, write_json

Results = dict[str, dict[str, list[Sample]]]

QUIET = 0.15  # cores that strangers may take from a run


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repetition of 1 s: a smoke test, not a measurement")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions, of which the median is reported")
    parser.add_argument("--seconds", type=float, default=4.0, help="measured time of one repetition")
    parser.add_argument("--warmup", type=float, default=1.0, help="time under load before the measured time")
    parser.add_argument(
        "--patience", type=float, default=0.0, help="seconds for which a run that strangers disturbed is repeated"
    )
    parser.add_argument("--only", nargs="+", choices=list(PEERS), default=list(PEERS), metavar="PEER")
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS), metavar="LOAD")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help=f"measure this one too, as {BEFORE}")
    parser.add_argument("--markdown", action="store_true", help="print the tables as GitHub markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write medians and every repetition")
    options = parser.parse_args()
    if options.quick:
        options.repeat, options.seconds = 1, 1.0
    return options


def schedule(loads: list[Load], peers: list[Peer], repeat: int) -> Iterator[tuple[Load, Peer]]:
    """Every peer once per load and round, each round beginning with another peer: drift of the machine hits all."""
    for turn in range(repeat):
        first = turn % len(peers)
        for load in loads:
            yield from ((load, peer) for peer in peers[first:] + peers[:first])


def measure_once(backend: Backend, load: Load, peer: Peer, options: argparse.Namespace, root: Path) -> Sample:
    try:
        with running_peer(peer, backend.ports[load.reply], root) as running:
            return measure(running, load, options.seconds, options.warmup, root)
    except (OSError, PeerError) as error:
        return Sample(failure=f"{type(error).__name__}: {error}")


def measure_in_quiet(backend: Backend, load: Load, peer: Peer, options: argparse.Namespace, root: Path) -> Sample:
    """On a shared machine, the least disturbed of the runs that `--patience` has time for. A failure always counts."""
    deadline = time.monotonic() + options.patience
    best = measure_once(backend, load, peer, options, root)
    while not best.failure and best.others > QUIET and time.monotonic() < deadline:
        again = measure_once(backend, load, peer, options, root)
        best = again if again.failure or again.others < best.others else best
    return best


def is_installed(peer: Peer) -> bool:
    """Return whether a peer can be started; name one that cannot."""
    if peer.package is None or peer_version(peer.package) is not None:
        return True
    print(f"{peer.name} is left out: {peers_python()} has no package {peer.package}", file=sys.stderr)
    return False


def progress(step: str, load: Load, peer: Peer, sample: Sample) -> None:
    cpu = f", {sample.cpu_us:,.1f} us CPU" if sample.cpu_us is not None else ""
    outcome = f"FAILED, {sample.failure}" if sample.failure else f"{sample.rate:,.0f} {load.unit}/s{cpu}"
    print(f"[{step}] {load.name} {peer.name}: {outcome}", file=sys.stderr, flush=True)


def run(options: argparse.Namespace) -> Results:
    loads = [LOADS[name] for name in options.loads]
    peers = [PEERS[name] for name in options.only if is_installed(PEERS[name])]
    if options.against is not None:
        peers.append(other_checkout(options.against))
    results: Results = {load.name: {peer.name: [] for peer in peers} for load in loads}
    steps = list(schedule(loads, peers, options.repeat))
    with tempfile.TemporaryDirectory(prefix="passthrough-") as folder:
        root = Path(folder)
        with running_backend(root / "backend") as backend:
            for number, (load, peer) in enumerate(steps, 1):
                work = root / str(number)
                work.mkdir()
                sample = measure_in_quiet(backend, load, peer, options, work)
                results[load.name][peer.name].append(sample)
                progress(f"{number}/{len(steps)}", load, peer, sample)
    return results


def main() -> int:
    options = arguments()
    missing = [tool for tool in ("nginx", "wrk") if shutil.which(tool) is None]
    if missing:
        print(f"not installed: {', '.join(missing)}", file=sys.stderr)
        return 2
    about = {**environment(), "repeats": str(options.repeat), "seconds": f"{options.seconds:g}"}
    results = run(options)
    print(render(results, about, options.markdown))
    if options.json:
        write_json(options.json, results, about)
    failed = any(sample.failure for by_peer in results.values() for samples in by_peer.values() for sample in samples)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
