"""The command `miles-router audit`: flags, progress bar and exit status."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from middleware_hub.auditing.tool import plot
from middleware_hub.auditing.tool.collecting import Sampling, collect
from middleware_hub.auditing.tool.report import lines, plain
from middleware_hub.auditing.tool.verdict import AuditedEpisodes, Limits, judge
from miles_router.client import Retries, RouterClient, RouterClientError
from miles_router.errors import ConfigError

#: Exit statuses. A wrong flag, or a router that does not answer, is 2 as for every command.
GOOD, DIFFERENT, NOTHING_COMPARABLE = 0, 1, 3
DESCRIPTION = """\
Compare recorded logprobs of sessions and text rollouts with recomputed ones. The router's engines score the recorded
tokens again, under the weights that sampled them. Prompts of sessions are rendered again and compared, too.
"""
EPILOG = """\
exit status:
  0  recorded and recomputed logprobs agree, and so do prompts
  1  logprobs differ too much, or prompts differ
  2  a wrong flag, or a router that does not answer
  3  nothing was comparable: other weights are loaded, or sampling settings have reshaped the logprobs

Tokens sampled by other weights than those loaded now are counted, not compared. Requests are sent one at a time and
wait while the fleet is paused. They are not recorded.
"""
BAR = 24
#: The environment variable of the clients' key, as the router itself reads it.
API_KEY = "MILES_ROUTER_API_KEY"
#: Few, because a user waits at the terminal.
RETRIES = Retries(attempts=2)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="miles-router audit",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    usual = Limits()
    made.add_argument("--router", required=True, metavar="URL", help="the router whose episodes are audited")
    made.add_argument("--sample", type=_count, default=20, metavar="N", help="samples to compare [default: 20]")
    made.add_argument(
        "--episode",
        "--session",
        action="append",
        default=[],
        metavar="ID",
        help="audit this session, or text rollout, and no other (repeatable)",
    )
    made.add_argument("--rate", type=_positive, default=2.0, metavar="X", help="episodes per second [default: 2]")
    made.add_argument(
        "--quantile",
        type=_share,
        default=usual.quantile,
        metavar="Q",
        help=f"the quantile of |recorded - recomputed| that is judged [default: {usual.quantile:g}]",
    )
    made.add_argument(
        "--threshold",
        type=_positive,
        default=usual.threshold,
        metavar="NATS",
        help=f"the largest value allowed for it; calibrate it on your own model [default: {usual.threshold:g}]",
    )
    made.add_argument("--seed", type=int, metavar="N", help="seed of the choice of episodes [default: random]")
    made.add_argument("--json", action="store_true", help="write the report as JSON")
    made.add_argument("--plot", type=Path, metavar="FILE", help="draw the distances (.png, .svg, .pdf)")
    made.add_argument("--api-key", metavar="KEY", help=f"the clients' key of the router [default: {API_KEY}]")
    return made


def run(arguments: Sequence[str]) -> int:
    """Run the command and return the exit status.

    Raises:
        ConfigError: a flag is wrong, the router does not answer, or it has no episodes route.
    """
    options = parser().parse_args(arguments)
    if options.plot is not None:
        plot.require(options.plot)
    try:
        found = asyncio.run(_collect(options))
    except (RouterClientError, ValueError) as error:
        raise ConfigError(f"audit: {plain(str(error))}") from None
    verdict = judge(found, Limits(options.quantile, options.threshold))
    if options.json:  # ASCII only: it quotes prompts, and a terminal would act on control characters
        print(json.dumps(verdict.as_json(), indent=2))
    else:
        print("\n".join(lines(verdict)))
    if options.plot is not None:
        plot.draw(verdict, options.plot)
    if verdict.good is None:
        return NOTHING_COMPARABLE
    return GOOD if verdict.good else DIFFERENT


async def _collect(options: argparse.Namespace) -> AuditedEpisodes:
    key = options.api_key or os.environ.get(API_KEY)
    wanted = Sampling(options.sample, options.episode, options.rate, options.seed)
    async with RouterClient(options.router, api_key=key, retries=RETRIES) as client:
        return await collect(client, wanted, _bar if sys.stderr.isatty() else _silent)


def _silent(done: int, of: int) -> None:
    """Show no progress: stderr is not a terminal."""


def _bar(done: int, of: int) -> None:
    filled = BAR * done // max(of, 1)
    end = "\n" if done >= of else ""
    print(f"\raudit [{'#' * filled}{'-' * (BAR - filled)}] {done}/{of}", end=end, file=sys.stderr, flush=True)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be a number above 0")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError("must be above 0 and at most 1")
    return value
