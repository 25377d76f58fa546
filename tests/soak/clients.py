"""Clients of all kinds. Each does one piece of work, holds what it got against the oracle, and says what it did."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from tests.compat.dressage_client import read_segments
from tests.fuzz.mutations import mutate
from tests.fuzz.session_bodies import BODIES, FIELDS, ODD
from tests.fuzz.target import expand
from tests.soak.oracle import Oracle
from tests.support.events import answers_of, events_of
from tests.support.experts_trial import MOE, array_of, experts_of
from tests.support.http import Client, CutReply, RawReply, request

CHAT = "/v1/chat/completions"
#: What a client may be told while workers die: it asks again.
UNLUCKY = (502, 503)
ATTEMPTS, PAUSE = 200, 0.05
SLOW_BUFFER, SLOW_STEP = 4096, 0.02
WORDS = ("the sea", "混合 numbers 12", "naïve café", "def f(x):\n    return x", "🚀 rockets", "привет мир")
JSON = ("Content-Type", "application/json")


class Unlucky(Exception):
    """No answer, or half of one: the worker was lost. What was not answered is asked again."""


@dataclass
class Clients:
    """Clients of one router."""

    url: str
    oracle: Oracle
    dice: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    prefix: str = ""
    _number: int = 0

    async def __aenter__(self) -> Clients:
        connector = aiohttp.TCPConnector(limit=0)
        self._http = aiohttp.ClientSession(self.url, connector=connector, timeout=aiohttp.ClientTimeout(total=120))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> bytes:
        """A good answer, asked for until there is one."""
        for _ in range(ATTEMPTS):
            try:
                return await self._once(path, body, headers)
            except Unlucky:
                self.counts["asked again"] += 1
                await asyncio.sleep(PAUSE)
        raise AssertionError(f"{path} is not answered")

    async def _once(self, path: str, body: Any, headers: Mapping[str, str] | None) -> bytes:
        try:
            async with self._http.post(path, json=body, headers=headers) as reply:
                data = await reply.read()
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, aiohttp.ClientOSError) as error:
            raise Unlucky from error
        if reply.status in UNLUCKY:
            raise Unlucky
        assert reply.status == 200, (path, reply.status, data[:500])
        if reply.content_type == "text/event-stream" and not data.endswith(b"data: [DONE]\n\n"):
            raise Unlucky
        return data

    def name(self) -> str:
        self._number += 1
        return f"n{self.prefix}{self._number}"

    # Kinds of work

    async def text_rollout(self) -> None:
        """A few turns of text, whole and streamed, each retrieved with its tokens and its rows."""
        text = f"{self.name()}: tell me of {self.dice.choice(WORDS)}.\n"
        for _ in range(self.dice.randint(2, 4)):
            stream = self.dice.random() < 0.5
            params = {"max_new_tokens": self.dice.randint(4, 60), "ignore_eos": self.dice.random() < 0.5}
            body = {"text": text, "sampling_params": params, "stream": stream, "return_logprob": True}
            (answer,) = answers_of(await self.post("/generate", body), stream=stream)
            rid, text = answer["meta_info"]["id"], text + answer["text"]
            found = json.loads(await self.post("/retrieve_from_text", {"rid": rid}))
            tokens, count = found["tokens"], len(answer["output_ids"])
            assert found["response"] == text
            assert tokens[len(tokens) - count :] == answer["output_ids"]
            assert found["loss_mask"][len(tokens) - count :] == [1] * count
            self.oracle.answer(tokens[: len(tokens) - count], answer)
            self.oracle.check(tokens, found["loss_mask"], found["rollout_logp"])
            await self._rows(rid, tokens)
            text += self.dice.choice((" and then", "\n\n", f"<|im_end|>\n<|im_start|>user\n{self.dice.randint(1, 99)}"))
            self.counts["streams" if stream else "whole answers"] += 1
        self.counts["text rollouts"] += 1

    async def _rows(self, rid: str, tokens: Sequence[int]) -> None:
        async with self._http.post("/routed_experts", json={"rid": rid}) as reply:
            data = await reply.read()
            assert reply.status == 200, data
            headers = [(name.lower().encode(), value.encode()) for name, value in reply.headers.items()]
        self.oracle.experts(tokens, array_of(RawReply(200, b"", headers, data)))

    async def agent(self) -> None:
        """A session of some turns with a branch, its samples, and its end."""
        session = self.name()
        await self.post("/sessions", {"session_id": session})
        await self._turns(f"/sessions/{session}{CHAT}", {})
        await self._collect(session)

    async def _turns(self, path: str, headers: Mapping[str, str]) -> None:
        history: list[Any] = [{"role": "user", "content": f"Go {self.dice.randint(1, 99)} steps, {self.name()}."}]
        for turn in range(self.dice.randint(2, 5)):
            answer = await self._turn(path, history, headers)
            if self.dice.random() < 0.2:
                answer = await self._turn(path, history, headers)  # a branch
            history += [answer, {"role": "user", "content": f"{turn}: {self.dice.choice(WORDS)}?"}]
        self.counts["agents"] += 1

    async def _turn(self, path: str, history: Sequence[Any], headers: Mapping[str, str]) -> dict[str, Any]:
        stream = self.dice.random() < 0.5
        body = {"model": "m", "max_tokens": self.dice.randint(4, 40), "messages": history, "stream": stream}
        data = await self.post(path, body, {**headers, "X-Turn-Id": self.name()})
        self.counts["turns"] += 1
        if not stream:
            message = json.loads(data)["choices"][0]["message"]
            return {name: value for name, value in message.items() if value is not None}
        deltas = [choice["delta"] for chunk in events_of(data) for choice in chunk["choices"]]
        return {"role": "assistant", "content": "".join(delta.get("content") or "" for delta in deltas)}

    async def _collect(self, session: str) -> None:
        samples = json.loads(await self.post(f"/sessions/{session}/samples", {}))["samples"]
        assert samples
        for sample in samples:
            self.oracle.sample(sample, experts_of(sample))
        self.counts["samples"] += len(samples)
        await self._delete(session)

    async def _delete(self, session: str) -> None:
        async with self._http.delete(f"/sessions/{session}") as reply:
            assert reply.status == 204, await reply.read()

    async def header_agent(self) -> None:
        """A session that is made by its first turn, finalized, read and drained."""
        session = self.name()
        await self._turns(CHAT, {"X-Session-Id": session, "X-Instance-Id": "soak"})
        await self.post("/session/finalize", {"session_id": session, "reward": 1.0})
        read = json.loads(await self.post("/trajectory/read", {"session_id": session, "drain": True}))
        rows = [sample.experts for sample in read_segments(read, layers=MOE.layers, top_k=MOE.top_k)]
        assert rows
        for segment, experts in zip(read["data"], rows, strict=True):
            self.oracle.sample(segment, experts)
        self.counts["samples"] += len(rows)

    async def expert_client(self) -> None:
        """Asks for the rows itself, and gets every one in the answer."""
        ids = [self.dice.randrange(3, 400) for _ in range(self.dice.randint(1, 30))]
        params = {"max_new_tokens": self.dice.randint(1, 30), "ignore_eos": True}
        wanted = {"return_routed_experts": True, "return_logprob": True}
        body = {"input_ids": ids, "sampling_params": params, **wanted}
        answer = json.loads(await self.post("/generate", body))
        self.oracle.answer(ids, answer)
        told = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), np.int32)
        self.oracle.experts([*ids, *answer["output_ids"]], told.reshape(-1, MOE.layers, MOE.top_k))
        self.counts["answers with rows"] += 1

    async def leaver(self) -> None:
        """Leaves in the middle: before its answer, or in it."""
        body = {"text": f"{self.name()} endless", "stream": self.dice.random() < 0.7}
        body["sampling_params"] = {"max_new_tokens": 5000, "ignore_eos": True}
        async with await Client.connect(self.url) as client:
            await client.send(request("POST", "/generate", [JSON], json.dumps(body).encode()))
            if body["stream"]:
                reply = await client.read_head("POST")
                if reply.status == 200:
                    await client.read_part()
            else:
                await asyncio.sleep(self.dice.random() * 0.2)
            (client.abort if self.dice.random() < 0.5 else client.reset)()
        self.counts["left"] += 1

    async def slow_reader(self) -> None:
        """Reads a stream in sips, and gets all of it."""
        ids = [self.dice.randrange(3, 400) for _ in range(8)]
        params = {"max_new_tokens": 40, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": params, "stream": True, "return_logprob": True}
        parts = []
        async with await Client.connect(self.url, receive_buffer=SLOW_BUFFER) as client:
            await client.send(request("POST", "/generate", [JSON], json.dumps(body).encode()))
            if (await client.read_head("POST")).status != 200:
                raise Unlucky
            while part := await client.read_part():
                parts.append(part)
                await asyncio.sleep(SLOW_STEP)
        (answer,) = answers_of(b"".join(parts), stream=True)
        self.oracle.answer(ids, answer)
        self.counts["slow readers"] += 1

    async def nonsense(self) -> None:
        """Bodies that nobody should send. None is answered with a 5xx of the router's own, or not at all."""
        path = self.dice.choice(list(BODIES))
        words = (*ODD, *(b'"%b": ' % name for name in FIELDS))
        body = expand(mutate(self.dice, self.dice.choice(BODIES[path]).encode(), words))
        if b'"n"' in body or b"max_" in body:
            return  # a worker would do its best to answer it with millions of tokens
        try:
            async with self._http.post(path, data=body, headers={"Content-Type": "application/json"}) as reply:
                data = await reply.read()
        except aiohttp.ClientPayloadError:  # what it asked for was streamed, and its worker was lost
            raise Unlucky from None
        assert reply.status < 500 or reply.status in UNLUCKY or b'"request_id"' not in data, (path, body, data)
        if path == "/sessions" and reply.status == 200:
            await self._delete(json.loads(data)["session_id"])
        self.counts["nonsense"] += 1


Work = Callable[[Clients], Awaitable[None]]
#: Each kind of client, and how many of them work at once.
KINDS: Mapping[Work, int] = {
    Clients.text_rollout: 6,
    Clients.agent: 4,
    Clients.header_agent: 2,
    Clients.expert_client: 2,
    Clients.leaver: 2,
    Clients.slow_reader: 2,
    Clients.nonsense: 1,
}


async def work(clients: Clients, kind: Work, until: float) -> None:
    """One piece of work after the other until a time of the loop's clock."""
    loop = asyncio.get_running_loop()
    while loop.time() < until:
        try:
            await kind(clients)
        except (Unlucky, CutReply, ConnectionError):
            clients.counts["broken off"] += 1
