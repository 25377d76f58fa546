"""How much would be wrong without exact tokens: what encoding the text of rollouts anew would have made of them.

    python -m tests.benchmarks.exact_tokens [--seeds N] [--groups N] [--json FILE] [--plot FILE.png]
    python -m tests.benchmarks.exact_tokens --trained

The rollouts of the exactness test against two real SGLang workers with random weights (the hardest input there is), the
Qwen3 tokenizer and the router between: what is retrieved is first held against what the workers' proxies recorded,
then the text of every turn is encoded and compared with the tokens that the engine was given and sampled. With
`--trained`: conversations with SmolLM2-135M-Instruct in their place.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from miles_router.client import RouterClient
from miles_router.settings.config import MiddlewareSpec
from tests.sglang.environment import ensure, trained_model
from tests.sglang_worker import RealWorker, real_workers
from tests.support.exactness import Compared, Drift, compare_all, drift
from tests.support.oracle import Ledger
from tests.support.recording_proxy import RecordingProxy
from tests.support.rollouts import GROUPS, TURNS, Rollouts
from tests.support.running_router import running_router
from tests.support.tokenizers import tokenizer

OPENINGS = (
    "Tell me about the sea.",
    "Write a short poem about rain.",
    "How do I bake bread?",
    "What is a prime number?",
    "Describe your favourite animal.",
    "Give me three tips for sleeping well.",
    "Who was Napoleon?",
    "Write a JSON object about a cat.",
)
NEXT = ("Why?", "Say it shorter.", "Give me an example, with numbers.", "And in another language?")
CONVERSATION = 5  # turns
ASKED = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
CACHE = MiddlewareSpec("middleware_hub.radix_tree_middleware.RadixTreeMiddleware", {})
BLUE, ORANGE, GREY = "#1f5fa8", "#d9822b", "#666666"


@dataclass
class Measured:
    """One run: what was compared, and the drift of the rollouts as they stood after each turn."""

    compared: Compared
    by_turn: list[Drift]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs, each of other rollouts (default: %(default)s)")
    parser.add_argument("--groups", type=int, default=GROUPS, help="groups of 8 rollouts (default: %(default)s)")
    parser.add_argument("--trained", action="store_true", help="conversations with a trained model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the shares over the turns")
    return parser.parse_args()


async def measured(workers: list[RealWorker], seed: int, groups: int) -> Measured:
    """Run the rollouts once, prove the retrieval exact, and measure."""
    async with RecordingProxy(workers[0].url) as one, RecordingProxy(workers[1].url) as other:
        model = str(ensure().dense_model)
        async with running_router(one.url, other.url, middlewares=(CACHE,), hf_checkpoint=model) as router:
            rollouts = Rollouts(router.url, seed=seed, groups=groups)
            await rollouts.run()
            ledger = Ledger(tokenizer("qwen3"))
            compared = await compare_all(router.url, [one, other], rollouts.turns, ledger)
    turns: list[list[Any]] = [[] for _ in range(TURNS)]
    for turn in rollouts.turns:
        turns[turn.turn].append(ledger.accounts[turn.rid])
    return Measured(compared, [drift(accounts, tokenizer("qwen3")) for accounts in turns])


async def conversations(workers: list[RealWorker], model: str, copies: int) -> list[Drift]:
    """Return the drift after each turn of conversations at temperature 1, so many with each opening."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    drifts = [Drift() for _ in range(CONVERSATION)]

    async def converse(client: RouterClient, opening: str) -> None:
        text = ASKED.format(opening)
        for turn, drifted in enumerate(drifts):
            answer = await client.generate(text, sampling_params={"temperature": 1.0, "max_new_tokens": 32})
            sample = await client.retrieve(text + answer.text, rid=answer.rid)
            end = [tokenizer.eos_token_id] if answer.status == "completed" else []  # which the text does not show
            anew = tokenizer.encode(text + answer.text) + end
            drifted.add(sample.tokens.tolist(), sample.loss_mask.tolist(), anew)
            text += f"{answer.text}<|im_end|>\n{ASKED.format(NEXT[turn % len(NEXT)])}"

    urls = [worker.url for worker in workers]
    async with (
        running_router(*urls, middlewares=(CACHE,), hf_checkpoint=model) as router,
        RouterClient(router.url) as client,
    ):
        await asyncio.gather(*(converse(client, opening) for opening in OPENINGS for _ in range(copies)))
    return drifts


def together(runs: list[Measured]) -> list[Drift]:
    sums = [[asdict(run.by_turn[turn]) for run in runs] for turn in range(TURNS)]
    return [Drift(**{name: sum(each[name] for each in runs_of) for name in runs_of[0]}) for runs_of in sums]


def plot(drifts: list[Drift], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), dpi=160)
    turns = range(1, len(drifts) + 1)
    rollouts = [100 * each.changed_rollouts / each.rollouts for each in drifts]
    tokens = [100 * each.changed_sampled / each.sampled for each in drifts]
    for shares, color, label in ((rollouts, BLUE, "rollouts changed"), (tokens, ORANGE, "sampled tokens changed")):
        axes.plot(turns, shares, color=color, marker="o", linewidth=2, label=label)
        for turn, share in zip(turns, shares, strict=True):
            axes.annotate(f"{share:.0f} %", (turn, share), (0, 7), textcoords="offset points", ha="center", fontsize=8)
    axes.axhline(0, color=GREY, linewidth=1, label="with exact tokens: 0 %")
    axes.legend(frameon=False, loc="center right")
    axes.set(xlabel="turns", ylabel="changed by encoding the text anew (%)", xticks=list(turns), ylim=(-4, 109))
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    options = arguments()
    if options.trained:
        model = trained_model()
        with real_workers(2, model=model) as workers:
            drifts = asyncio.run(conversations(workers, str(model), copies=8))
        for turn, each in enumerate(drifts, 1):
            print(f"after turn {turn}: {each}")
        return
    with real_workers(2) as workers:
        runs = [asyncio.run(measured(workers, seed, options.groups)) for seed in range(options.seeds)]
    drifts = together(runs)
    generations, positions = (sum(getattr(run.compared, name) for run in runs) for name in ("generations", "positions"))
    print(f"{generations} generations with {positions} positions: all equal to the account at the workers' proxies")
    for turn, each in enumerate(drifts, 1):
        print(f"after turn {turn}: {each}")
    if options.json:
        figures = {"compared": [asdict(run.compared) for run in runs], "by_turn": [asdict(each) for each in drifts]}
        options.json.write_text(json.dumps(figures, indent=1))
    if options.plot:
        plot(drifts, options.plot)


if __name__ == "__main__":
    main()
