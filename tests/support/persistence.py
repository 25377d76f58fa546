"""Agents and text rollouts that go on whatever becomes of their router's processes, and what they were answered.

What breaks off, or is refused until a process is there again, is asked again. What was answered to its end is held
against what the worker sampled, once all is over.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from miles_router.testing.worker.exchange_log import GenerationRecord
from tests.support.session_trial import CHAT, Message, exactly, user
from tests.support.waiting import PATIENCE, STEP

#: The longest text of a rollout, in characters; then its prompt begins anew.
LONGEST = 400
#: What is asked again: a process is being started again, or was lost while it was asked.
AWAY = {(503, "unavailable"), (502, "upstream_error")}


class Persistence:
    """A client that asks until it has a whole answer. `kept`: on kept connections, else each on one of its own."""

    def __init__(self, url: str, *, kept: bool, broken: Counter[str]) -> None:
        self.broken = broken
        connector = aiohttp.TCPConnector(force_close=not kept)
        self._http = aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout(total=PATIENCE))

    async def close(self) -> None:
        await self._http.close()

    async def ask(self, path: str, body: Any, headers: dict[str, str] | None = None, method: str = "POST") -> bytes:
        """The whole answer."""
        while True:
            try:
                async with self._http.request(method, path, json=body, headers=headers) as reply:
                    data = await reply.read()
            except aiohttp.ClientError as error:
                self.broken[type(error).__name__] += 1
                await asyncio.sleep(STEP)
                continue
            if reply.status == 200 and (not body or not body.get("stream") or data.endswith(b"data: [DONE]\n\n")):
                return data
            refusal = json.loads(data)["error"]["type"]
            assert (reply.status, refusal) in AWAY, data
            assert reply.status == 503 or b"of the router was lost" in data, data
            self.broken[refusal] += 1


def events(body: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: {")]


@dataclass
class Agent:
    """One session; each turn has its own `X-Turn-Id`, however often it is asked."""

    name: str
    messages: list[Message] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)

    async def run(self, client: Persistence, going: Callable[[], bool]) -> None:
        self.messages.append(user(f"Count for {self.name}."))
        while going():
            stream = len(self.answers) % 2 == 1
            body = {"model": "m", "max_tokens": 8, "messages": self.messages, "stream": stream}
            turn = {"X-Turn-Id": f"t-{len(self.answers)}"}
            answer = await client.ask(f"/sessions/{self.name}{CHAT}", body, turn)
            said = _streamed(answer) if stream else json.loads(answer)["choices"][0]["message"]["content"]
            self.answers.append(said)
            self.messages += [{"role": "assistant", "content": said}, user(f"And {len(self.answers)}?")]

    async def check(self, client: Persistence, sampled: dict[str, GenerationRecord]) -> int:
        """Every answered turn is in one line, exactly; how many tokens were compared."""
        path = f"/sessions/{self.name}"
        records = json.loads(await client.ask(path, None, method="GET"))["records"]
        assert [each["reason"] for each in records] == [None] * len(self.answers), "in one segment"
        (sample,) = json.loads(await client.ask(f"{path}/samples", {"format": "json"}))["samples"]
        turns = [sampled[each["rid"]] for each in sample["metadata"]["turns"]]
        assert [each.text for each in turns] == self.answers, "what was answered, and nothing else"
        exactly(sample, *turns)
        assert _versions(sample["weight_versions"]) == [
            (at, version) for turn in turns for at, version in enumerate(_spread(turn), len(turn.input_ids))
        ]
        return len(sample["tokens"])


def _streamed(body: bytes) -> str:
    return "".join(each["delta"].get("content") or "" for event in events(body) for each in event["choices"])


def _versions(runs: Sequence[Any]) -> list[tuple[int, str]]:
    return [(at, run["version"]) for run in runs for at in range(run["start"], run["end"])]


def _spread(record: GenerationRecord) -> list[str]:
    return [span.version for span in record.weight_versions for _ in range(span.start, span.end)]


@dataclass
class Rollout:
    """Texts that go on from one another, over plain `/generate`; each answered one with its id."""

    name: str
    answered: list[list[tuple[str, str]]] = field(default_factory=list)  # by text: its turns' ids and whole texts

    async def run(self, client: Persistence, going: Callable[[], bool]) -> None:
        params = {"max_new_tokens": 8, "ignore_eos": True, "skip_special_tokens": False}  # all of it is seen
        while going():
            text, turns = f"Rollout {self.name}, text {len(self.answered)}:", list[tuple[str, str]]()
            self.answered.append(turns)
            while going() and len(text) < LONGEST:
                stream = len(turns) % 2 == 1
                answer = await client.ask("/generate", {"text": text, "sampling_params": params, "stream": stream})
                last = events(answer)[-1] if stream else json.loads(answer)
                text += last["text"]
                turns.append((last["meta_info"]["id"], text))
                text += " Go on:"

    async def check(self, client: Persistence, sampled: dict[str, GenerationRecord]) -> int:
        """Every answered text is there, and each went on with the tokens of the one before; how many were compared."""
        compared = 0
        for turns in self.answered:
            tokens: list[int] = []
            mask: list[int] = []
            logprobs: list[float] = []
            for rid, text in turns:
                record = sampled[rid]
                assert record.input_ids[: len(tokens)] == tokens, "it goes on with what was sampled"
                new = record.input_ids[len(tokens) :]
                tokens += [*new, *record.output_ids]
                mask += [0] * len(new) + [1] * len(record.output_ids)
                logprobs += [0.0] * len(new) + record.logprobs
                found = json.loads(await client.ask("/retrieve_from_text", {"rid": rid, "text": text}))
                assert (found["tokens"], found["loss_mask"], found["finished"]) == (tokens, mask, True)
                assert np.array_equal(np.array(found["rollout_logp"], np.float32), np.array(logprobs, np.float32))
                own = _versions(found["weight_versions"])[-len(record.output_ids) :]
                assert own == [*enumerate(_spread(record), len(record.input_ids))]
                compared += len(tokens)
        return compared
