"""Text rollouts as a trainer's script makes them, in all their variety: several turns over plain HTTP, in groups."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.support.events import answers_of
from tests.support.generations import GENERATE
from tests.support.oracle import Visible
from tests.support.tiers import size
from tests.support.waiting import PATIENCE

GROUPS, SIZE, TURNS = size(heavy=(16, 8, 5), otherwise=(7, 4, 4))
SUBJECTS = (
    "the sea",
    "混合 numbers 12",
    "naïve café",
    "def f(x):\n    return x",
    "🚀 rockets",
    "привет мир",
    "a  b   c",
)
#: Qwen3 ids that random weights would nearly never sample: <|endoftext|>, <|im_start|>, <|im_end|>, <think>.
MARKERS = (151643, 151644, 151645, 151667)
LIKELY = 9.5  # a bias that makes each of them come up once in some fifteen tokens
STOPS: tuple[Any, ...] = (["e"], ["a", "o"], [" "], ["tion", "is", "er"], "\n", ["。", "一", "и"])
BETWEEN_TURNS = ("markup", "markup", "as it is", "words", "cut", "cut and words", "sibling", "unicode")


@dataclass
class Turn:
    """One generation as its client knows it."""

    group: int
    rollout: int
    turn: int
    rid: str
    seen: Visible
    text: str  # that came back

    @property
    def whole(self) -> str:
        return self.seen.prompt + self.text


@dataclass
class Rollouts:
    """`await Rollouts(url).run()`; then `turns` says what every client sent and got."""

    url: str
    groups: int = GROUPS
    size: int = SIZE
    length: int = TURNS
    seed: int = 0
    turns: list[Turn] = field(default_factory=list)
    last: dict[tuple[int, int], Turn] = field(default_factory=dict)

    async def run(self) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=10 * PATIENCE)
        async with aiohttp.ClientSession(self.url, connector=connector, timeout=timeout) as session:
            pairs = [(group, rollout) for group in range(self.groups) for rollout in range(self.size)]
            await asyncio.gather(*(self._rollout(session, group, rollout) for group, rollout in pairs))

    async def _rollout(self, session: aiohttp.ClientSession, group: int, rollout: int) -> None:
        dice = random.Random(f"{self.seed}/{group}/{rollout}")
        text = first_prompt(group)
        for turn in range(self.length):
            body = request_body(dice, text)
            texts = [text]
            if dice.random() < 0.1 and (other := self.last.get((group, dice.randrange(self.size)))):
                texts = [text, other.whole]
                body["text"] = texts
            sent = time.monotonic()
            answers = await generate(session, body)
            received = time.monotonic()
            samples = body["sampling_params"].get("n", 1)
            mine = [
                Turn(
                    group, rollout, turn, a["meta_info"]["id"], Visible(texts[i // samples], sent, received), a["text"]
                )
                for i, a in enumerate(answers)
            ]
            self.turns += mine
            self.last[group, rollout] = chosen = dice.choice(mine)
            text = self._continued(dice, chosen)

    def _continued(self, dice: random.Random, turn: Turn) -> str:
        kind = dice.choice(BETWEEN_TURNS)
        text = turn.whole
        if kind == "sibling":
            text = self.last.get((turn.group, dice.randrange(self.size)), turn).whole
        if kind.startswith("cut"):
            text = text[: len(text) - dice.randint(1, 6)] or text
        if kind == "markup":
            text += f"<|im_end|>\n<|im_start|>user\nGo on, {dice.randint(1, 99)}.<|im_end|>\n<|im_start|>assistant\n"
        if kind.endswith("words") or kind == "sibling":
            text += dice.choice((" and then", "ly", "s", "\n\n", " ", "12", "!"))
        if kind == "unicode":
            text += dice.choice(("é", " 世界", "👍🏽", "\u0301", "\N{REPLACEMENT CHARACTER}"))
        return text


def first_prompt(group: int) -> str:
    subject = SUBJECTS[group % len(SUBJECTS)]
    return f"<|im_start|>user\nTell me about {subject}, {group}.<|im_end|>\n<|im_start|>assistant\n"


def request_body(dice: random.Random, text: str) -> dict[str, Any]:
    """A request in one of the many ways there are."""
    params: dict[str, Any] = {"temperature": 1, "max_new_tokens": dice.randint(8, 24)}
    if dice.random() < 0.5:
        params["stop"] = dice.choice(STOPS)
    if dice.random() < 0.5:
        params["no_stop_trim"] = True
    if dice.random() < 0.5:
        params["skip_special_tokens"] = False
    if dice.random() < 0.2:
        params["ignore_eos"] = True
    if dice.random() < 0.6:
        params["logit_bias"] = {str(token): LIKELY for token in dice.sample(MARKERS, 2)}
    if dice.random() < 0.1:
        params["n"] = 2
    body: dict[str, Any] = {"text": text, "sampling_params": params}
    if dice.random() < 0.3:
        body["stream"] = True
    if dice.random() < 0.1:
        body["return_logprob"] = True
    return body


async def generate(
    session: aiohttp.ClientSession, body: Mapping[str, Any], request_id: str | None = None
) -> list[dict[str, Any]]:
    """The answers, as a list whatever the request; of a stream (cumulative) the last events."""
    headers = {"X-Request-Id": request_id} if request_id is not None else {}
    async with session.post(GENERATE, json=body, headers=headers) as reply:
        data = await reply.read()
        assert reply.status == 200, data
    return answers_of(data, stream=bool(body.get("stream")))
