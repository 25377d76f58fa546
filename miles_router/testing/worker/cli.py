"""The command `miles-router-worker`, which starts simulated SGLang workers."""

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Sequence

_DESCRIPTION = """\
Start simulated SGLang workers: SGLang's HTTP protocol, seeded, without a model or a GPU.
For writing and testing rollout code on a laptop."""

_EXAMPLES = """\
examples:
  miles-router-worker --port 30001
      one worker with the built-in toy vocabulary
  miles-router-worker --port 30001 --count 4 --router http://127.0.0.1:30000
      four workers on ports 30001 to 30004 which register themselves with a router
  miles-router-worker --tokenizer ./Qwen3-8B --moe 48x128x8 --token-latency-ms 5
      a real vocabulary, routed experts of that shape, 200 tokens a second"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="miles-router-worker",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=0, help="port of the first worker; 0 takes free ones (default: %(default)s)")
    add("--count", type=int, default=1, help="workers in this process, on consecutive ports (default: %(default)s)")
    add(
        "--seed", type=int, default=0, help="stands for the weights: workers with one seed sample the same (default: 0)"
    )
    add("--tokenizer", metavar="DIR", help="directory with tokenizer.json (default: a built-in toy vocabulary)")
    add("--token-latency-ms", type=float, default=0.0, help="milliseconds that one token takes (default: %(default)s)")
    add("--weight-version", default="default", help="weight version to report (default: %(default)s)")
    add("--model-path", default="simulated-model", help="model name to report (default: %(default)s)")
    add("--moe", metavar="LAYERSxEXPERTSxTOPK", help="return routed experts of this shape, for example 4x8x2")
    add("--dp-size", type=int, default=1, help="data-parallel ranks of each worker (default: %(default)s)")
    add("--indexer", metavar="LAYERSxTOPK", help="return positions chosen by sparse attention, for example 2x4")
    add(
        "--script",
        metavar="FILE",
        help="answers to agents, step by step: a JSON list (docs/simulated-worker.md)",
    )
    add("--router", metavar="URL", help="register with this router, retrying until it answers")
    add("--api-key", help="require this key as a bearer token")
    add("--incremental-streaming-output", action="store_true", help="stream deltas instead of everything so far")
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"], help="(default: %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT, then return 0. Exit with 2 if arguments are invalid."""
    parser = build_parser()
    args = parser.parse_args(argv)
    for flag, number in (("--count", args.count), ("--dp-size", args.dp_size)):
        if number < 1:
            parser.error(f"{flag} must be at least 1")
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        asyncio.run(_serve(args))
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    return 0


async def _serve(args: argparse.Namespace) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    # Imported only here, so that --help is fast.
    from miles_router.testing.worker.model.indexer import IndexerShape
    from miles_router.testing.worker.model.moe import MoeShape
    from miles_router.testing.worker.model.script import Script
    from miles_router.testing.worker.simulated_worker import SimulatedWorker, load_tokenizer

    tokenizer = load_tokenizer(args.tokenizer)
    script = Script.from_file(args.script) if args.script else None
    async with contextlib.AsyncExitStack() as stack:
        for index in range(args.count):
            worker = SimulatedWorker(
                host=args.host,
                port=args.port + index if args.port else 0,
                seed=args.seed,
                replica=index,
                tokenizer=tokenizer,
                token_latency_s=args.token_latency_ms / 1000,
                weight_version=args.weight_version,
                model_path=args.model_path,
                moe=MoeShape.parse(args.moe) if args.moe else None,
                indexer=IndexerShape.parse(args.indexer) if args.indexer else None,
                script=script,
                dp_size=args.dp_size,
                router_url=args.router,
                api_key=args.api_key,
                incremental_streaming_output=args.incremental_streaming_output,
                # A process's recorded exchanges cannot be read from outside, and bodies are large.
                log_limit=16,
            )
            await stack.enter_async_context(worker)
            model = worker.settings.model_path
            print(f"simulated SGLang worker at {worker.url}  model={model}  seed={args.seed}", flush=True)
        await stopped.wait()


if __name__ == "__main__":
    sys.exit(main())
