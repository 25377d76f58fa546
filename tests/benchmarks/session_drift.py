"""How much of agents' samples would be wrong without exact tokens: what rendering and encoding their messages makes.

    python -m tests.benchmarks.session_drift [--agents N] [--turns N] [--seeds N]

The agents of the sessions' proof against two real SGLang workers with random weights and the Qwen3 tokenizer. Every
sample is first held against the account at the workers' proxies; then the conversation it is of, as the agent knows it,
is rendered with the chat template and encoded as one text, and what was sampled is looked for in that.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp
import numpy as np

from miles_router.settings.config import MiddlewareSpec
from tests.sglang.environment import ensure
from tests.sglang_worker import RealWorker, real_workers
from tests.support.agent_apis import Message
from tests.support.agents import AGENTS, TURNS, Agents, Asked
from tests.support.generations import Generation
from tests.support.oracle import common_length
from tests.support.recording_proxy import RecordingProxy, chats_of
from tests.support.running_router import running_router
from tests.support.session_proof import IM_END, Proved, Sample, check_session, line_of
from tests.support.tokenizers import tokenizer

SESSIONS = MiddlewareSpec("middleware_hub.openai_session_middleware.OpenAISessionMiddleware", {})


@dataclass
class SessionDrift:
    """What rendering and encoding would have changed: samples with some sampled token lost, and sampled tokens lost, of
    each kind of turn; and how much of each prompt would still have been in the engine's prefix cache."""

    samples: int = 0
    changed_samples: int = 0
    turns: Counter[str] = field(default_factory=Counter)
    changed_turns: Counter[str] = field(default_factory=Counter)
    sampled: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)
    prompts: int = 0
    cached: int = 0

    def __str__(self) -> str:
        lines = [
            f"rendering and encoding changes {share(self.changed_samples, self.samples)} of {self.samples} samples, "
            f"{share(self.changed_turns.total(), self.turns.total())} of {self.turns.total()} turns, "
            f"{share(self.changed.total(), self.sampled.total())} of {self.sampled.total()} sampled tokens",
            f"and leaves {share(self.cached, self.prompts)} of the prompts of continued turns in the prefix cache",
        ]
        for kind in sorted(self.turns):
            turns, tokens = self.turns[kind], self.sampled[kind]
            of_turns, of_tokens = share(self.changed_turns[kind], turns), share(self.changed[kind], tokens)
            lines.append(f"| {kind} | {turns} | {of_turns} | {tokens:,} | {of_tokens} |")
        return "\n".join(lines)


def share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "none"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=AGENTS, help="sessions at once (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=TURNS, help="turns of each agent (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="runs, each of other agents (default: %(default)s)")
    return parser.parse_args()


async def measure(workers: list[RealWorker], agents: Agents, proved: Proved, drift: SessionDrift) -> None:
    """Run the agents once, prove their samples exact, and measure."""
    model = str(ensure().dense_model)
    async with (
        RecordingProxy(workers[0].url) as one,
        RecordingProxy(workers[1].url) as other,
        running_router(one.url, other.url, middlewares=(SESSIONS,), hf_checkpoint=model) as router,
        aiohttp.ClientSession(router.url) as http,
    ):
        await router.probed()
        agents.url = router.url
        await agents.run()
        went = chats_of([one, other], version="default")
        for session in agents.sessions:
            async with http.post(f"/sessions/{session}/samples", json={}) as reply:
                samples = (await reply.json())["samples"]
            of_session = went.of(session)
            check_session(proved, samples, of_session, agents.log.asked, tokenizer("qwen3"))
            add(drift, samples, of_session, agents.log.asked)


def add(drift: SessionDrift, samples: Sequence[Sample], went: Sequence[Generation], asked: Mapping[str, Asked]) -> None:
    """What rendering and encoding the conversations of one session changes."""
    by_rid = {each.rid: each for each in went}
    before: dict[str, Generation] = {}
    for first in (each for each in went if each.rendered):
        assert prompt(asked[first.request_id]) == first.given, "this is how the engine renders"
    for sample in samples:
        line = line_of(sample, by_rid)
        leaf = line[-1].generation
        request = asked[leaf.request_id]
        anew = encoded([*request.messages, request.answers[leaf.choice]], request.tools, more=False)
        kept = counterparts(sample["tokens"], anew)
        drift.samples += 1
        drift.changed_samples += bool((np.array(sample["loss_mask"], dtype=bool) & ~kept).any())
        for turn in (turn for turn in line if turn.trained and turn.kept):
            lost = ~kept[turn.start : turn.start + turn.kept]
            kind = asked[turn.generation.request_id].kind
            drift.turns[kind] += 1
            drift.changed_turns[kind] += bool(lost.any())
            drift.sampled[kind] += len(lost)
            drift.changed[kind] += int(lost.sum())
        before.update((after.generation.rid, each.generation) for each, after in pairwise(line))
    for rid, parent in before.items():
        sent = prompt(asked[by_rid[rid].request_id])
        drift.prompts += len(sent)
        drift.cached += common_length(sent, [*prompt(asked[parent.request_id]), *parent.sampled])


def prompt(request: Asked) -> list[int]:
    """What an engine that is sent the messages of a request gives the model."""
    return encoded(request.messages, request.tools, more=True)


def counterparts(exact: Sequence[int], anew: Sequence[int]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which exact positions have a counterpart in the encoding, by the longest matching blocks. An end of turn that the
    template writes and nobody sampled is no counterpart of anything."""
    if exact[-1] != IM_END:
        anew = anew[: len(anew) - 1 - list(reversed(anew)).index(IM_END)]
    kept = np.zeros(len(exact), dtype=bool)
    for block in difflib.SequenceMatcher(None, exact, anew, autojunk=False).get_matching_blocks():
        kept[block.a : block.a + block.size] = True
    return kept


def encoded(messages: Sequence[Message], tools: Sequence[Any] | None, *, more: bool) -> list[int]:
    """A conversation as the engine renders and encodes it; `more` for the prompt for an answer."""
    qwen = tokenizer("qwen3")
    rendered = qwen.apply_chat_template(
        list(map(prepared, messages)),
        tools=[{**tool, "defer_loading": None} for tool in tools] if tools else None,  # as SGLang describes them
        tokenize=False,
        add_generation_prompt=more,
    )
    return list(qwen.backend_tokenizer.encode(rendered, add_special_tokens=False).ids)


def prepared(message: Message) -> dict[str, Any]:
    calls = [
        {"type": "function", "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "content": message.get("content") or "", **({"tool_calls": calls} if calls else {})}


def main() -> None:
    options = arguments()
    proved, drift = Proved(), SessionDrift()
    with real_workers(2) as workers:
        for seed in range(options.seeds):
            agents = Agents("", options.agents, options.turns, seed)
            asyncio.run(measure(workers, agents, proved, drift))
    print(f"{proved}\nall equal to the account at the workers' proxies\n{drift}")


if __name__ == "__main__":
    main()
