"""What the model is to learn: questions, rollouts and rewards.

The trainer imports this in SGLang's environment, so it imports only the client of the router.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from miles_router.client import Generation, RouterClient, Sample, Session, single_turn

_PAIRS = """
France Paris, Italy Rome, Japan Tokyo, Spain Madrid, Germany Berlin, Russia Moscow, China Beijing, Egypt Cairo,
Greece Athens, Peru Lima, Austria Vienna, Portugal Lisbon, Poland Warsaw, Ireland Dublin, Norway Oslo,
Sweden Stockholm, Denmark Copenhagen, Finland Helsinki, Hungary Budapest, Cuba Havana, Kenya Nairobi,
Thailand Bangkok, Canada Ottawa, Iran Tehran, Iraq Baghdad, Turkey Ankara, Ukraine Kyiv, Chile Santiago,
Vietnam Hanoi, Lebanon Beirut, Syria Damascus, Belgium Brussels, Bulgaria Sofia, Romania Bucharest,
Afghanistan Kabul, Australia Canberra, Nepal Kathmandu, Ghana Accra, Senegal Dakar, Colombia Bogota,
England London, Scotland Edinburgh, Israel Jerusalem, Serbia Belgrade, Croatia Zagreb, Morocco Rabat,
Taiwan Taipei, Venezuela Caracas
"""
CAPITALS = tuple((pair.split()[0], pair.split()[1]) for pair in _PAIRS.split(","))
#: Every third country is never trained on.
HELD_OUT = CAPITALS[::3]
TRAINED = tuple(pair for pair in CAPITALS if pair not in HELD_OUT)

Question = tuple[str, str]


@dataclass(frozen=True)
class Rollout:
    """One rollout: its exact sample with its reward, the text in front of the response, and the last answer."""

    sample: Sample
    prompt: str
    answer: str

    @property
    def reward(self) -> float:
        """The sample's."""
        assert isinstance(self.sample.reward, float)
        return self.sample.reward


class Task(Protocol):
    """A task of `--task`. `config` is the router's configuration file for it; `steps` are enough to learn it."""

    config: ClassVar[str]
    steps: ClassVar[int]

    async def rollout(self, client: RouterClient, question: Question, temperature: float) -> Rollout:
        """Sample one answer to a question and judge it."""

    async def under_way(self, client: RouterClient) -> None:
        """Wait until the rollouts that have just been started are being sampled."""


def draw(seed: int, count: int) -> list[Question]:
    """Draw questions to train on: the same for the same seed."""
    return random.Random(seed).sample(TRAINED, count)


def held_out(count: int) -> list[Question]:
    """Return `count` questions that are never trained on, in turn."""
    return [HELD_OUT[place % len(HELD_OUT)] for place in range(count)]


class Capitals:
    """Name the capital and stop: one turn of text. The reward is 1, or 0.5 where the answer was cut at its longest."""

    config: ClassVar[str] = "configs/grpo-text.yaml"
    steps: ClassVar[int] = 16
    max_new_tokens = 12
    prompt = "<|im_start|>user\nWhat is the capital of {}? Answer with one word.<|im_end|>\n<|im_start|>assistant\n"

    async def rollout(self, client: RouterClient, question: Question, temperature: float) -> Rollout:
        """Sample one answer to a question and judge it."""
        country, capital = question
        prompt = self.prompt.format(country)
        sampling = {"temperature": temperature, "max_new_tokens": self.max_new_tokens}

        def reward(answer: Generation) -> float:
            return (1.0 if answer.status == "completed" else 0.5) if capital in answer.text else 0.0

        sample = await single_turn(client, prompt, sampling, reward=reward, label=capital)
        return Rollout(sample, prompt, sample.response)

    async def under_way(self, client: RouterClient) -> None:
        """Wait for the first token of a stream that was asked for behind the rollouts."""
        prompt = self.prompt.format("Atlantis")
        stream = client.generate_stream(prompt, sampling_params={"max_new_tokens": 4, "temperature": 1.0})
        async with aclosing(stream):
            async for _ in stream:
                return


class LookUp:
    """Look a number up and repeat it: two turns of an agent over the chat API.

    The model writes `FIND <name>`, the tool answers with a number that no model knows, and the model's last answer must
    have it. The reward is 0.3 for the right call, and 1 for the number as well.
    """

    config: ClassVar[str] = "configs/agents.yaml"
    steps: ClassVar[int] = 10
    max_new_tokens = 12
    system = "You look up phone numbers. First write FIND and the name. Then repeat the number."
    example: ClassVar[Sequence[Mapping[str, str]]] = (
        {"role": "user", "content": "What is the number of India?"},
        {"role": "assistant", "content": "FIND India"},
        {"role": "user", "content": "RESULT 5093"},
        {"role": "assistant", "content": "5093"},
    )

    def __init__(self) -> None:
        self._answered = asyncio.Event()

    async def under_way(self, client: RouterClient) -> None:
        """Wait for the first answer, behind which its rollout has another turn."""
        self._answered.clear()
        await self._answered.wait()

    async def rollout(self, client: RouterClient, question: Question, temperature: float) -> Rollout:
        """Run one episode in a session of its own and judge it."""
        name, _ = question
        number = str(random.Random(name).randrange(1000, 10000))
        asked = {"role": "user", "content": f"What is the number of {name}?"}
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": self.system},
            *map(dict, self.example),
            asked,
        ]
        async with await client.create_session() as session:
            call = await self._turn(session, messages, temperature)
            found = re.match(r"FIND (\w+)", call)
            right = found is not None and found[1] == name
            answer = call
            if found is not None:
                messages += [
                    {"role": "assistant", "content": call},
                    {"role": "user", "content": f"RESULT {number if right else 'none'}"},
                ]
                answer = await self._turn(session, messages, temperature)
            reward = (0.3 if right else 0.0) + (0.7 if right and number in answer else 0.0)
            (sample,) = await session.collect(reward=reward, label=number)
        return Rollout(sample, "", answer)

    async def _turn(self, session: Session, messages: Sequence[Mapping[str, Any]], temperature: float) -> str:
        answer = await session.chat(messages, temperature=temperature, max_tokens=self.max_new_tokens)
        self._answered.set()
        content: str | None = answer["choices"][0]["message"]["content"]
        return content or ""


TASKS: Mapping[str, type[Task]] = {"capitals": Capitals, "lookup": LookUp}
