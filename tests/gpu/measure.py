"""What a GPU costs, and how far its logprobs lie apart: `python -m tests.gpu.measure cost|logprobs --model DIRECTORY`.

`cost`: seconds of a prefill by tokens, computed and cached, and of a decode step by batch and context. `logprobs`:
those recorded while decoding beside those of one prefill of the same ids, under the same weights and under others.
Everything is asked of the worker itself; times are those of its HTTP answers on the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from typing import Any

from tests.gpu.costs import costs
from tests.gpu.engine import add_options, device_name, engine, sender, write_report
from tests.gpu.logprobs import apart
from tests.gpu.model import read_shape

SEED = 1


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The report."""
    shape = read_shape(arguments.model)
    dice = random.Random(SEED)
    async with engine(arguments) as made, sender(arguments, made.url) as sends:
        await sends.send(SEED)
        report = {"device": device_name(), **await made.facts(), "model": {"shape": shape.moe_shape}}
        if arguments.what == "cost":
            return {**report, **await costs(made, dice, arguments.largest)}
        return {**report, **await apart(made, sends, dice, SEED, shape)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.measure", description=__doc__)
    parser.add_argument("what", choices=("cost", "logprobs"))
    add_options(parser)
    parser.add_argument(
        "--largest", type=int, default=32768, help="tokens of the longest prompt (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)
    write_report(arguments, asyncio.run(measure(arguments)))


if __name__ == "__main__":
    main()
