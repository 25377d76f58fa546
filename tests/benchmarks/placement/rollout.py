"""Rollout code: plays all episodes of a workload through one router, over real sockets, and says how long it took."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from tests.benchmarks.placement.workload import Episode, Ids
from tests.benchmarks.process import HOST

#: A request that fails is sent again so often, as rollout code does; then its episode counts as failed.
TRIES = 20
_PAUSE_S = 0.05


@dataclass(slots=True)
class Played:
    """Of one run; seconds are the fleet's."""

    makespan_s: float = 0.0
    turns_s: list[float] = field(default_factory=list)
    overheads_s: list[float] = field(default_factory=list)
    """What each turn took beside the engine's own time, in real seconds."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    retractions: int = 0
    repeats: int = 0
    failed: int = 0


class Rollout:
    """One run. A session's requests bear its key, as agents' do; a text rollout's bear none.

    A request says `max_new_tokens` as a trainer's does, the most that any answer of the workload may have. How long its
    own will be is told to the simulated engine alone.
    """

    def __init__(self, episodes: Sequence[Episode], port: int, time_scale: float, seed: int) -> None:
        self._episodes = episodes
        self._url = f"http://{HOST}:{port}/generate"
        self._scale = time_scale
        self._ids = Ids(seed)
        self._most = max(turn.output_tokens for episode in episodes for turn in episode.turns)
        self._first = min(episode.at for episode in episodes)
        self._played = Played()
        self._seed = seed

    async def play(self, ended: Callable[[int], None]) -> Played:
        """Play everything; `ended` hears how many episodes have."""
        prompts = [self._ids.prompt(number, episode) for number, episode in enumerate(self._episodes)]
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
            self._began = time.monotonic()
            playing = [
                asyncio.ensure_future(self._episode(session, number, episode, prompt))
                for number, (episode, prompt) in enumerate(zip(self._episodes, prompts, strict=True))
            ]
            for done, each in enumerate(asyncio.as_completed(playing), 1):
                await each
                ended(done)
        return self._played

    async def _episode(self, session: aiohttp.ClientSession, number: int, episode: Episode, prompt: bytes) -> None:
        await asyncio.sleep((episode.at - self._first) / self._scale)
        headers = {"content-type": "application/json"}
        if len(episode.turns) > 1:
            headers["x-smg-routing-key"] = f"seed-{self._seed}-episode-{number}"
        for index, turn in enumerate(episode.turns):
            began = time.monotonic()
            answer = await self._answer(session, headers, prompt, turn.output_tokens, f"{number}-{index}")
            now = time.monotonic()
            if answer is None:
                self._played.failed += 1
                return
            self._played.turns_s.append((now - began) * self._scale)
            self._played.makespan_s = max(self._played.makespan_s, (now - self._began) * self._scale)
            self._played.overheads_s.append(now - began - answer["meta_info"]["e2e_latency"])
            self._count(answer["meta_info"])
            if index + 1 < len(episode.turns):
                said = b",".join(b"%d" % token for token in answer["output_ids"])
                appended = self._ids.appended(number, index, turn.append_tokens)
                prompt = b",".join(part for part in (prompt, said, appended) if part)
                await asyncio.sleep(turn.tool_wait_s / self._scale)

    async def _answer(
        self, session: aiohttp.ClientSession, headers: dict[str, str], prompt: bytes, tokens: int, rid: str
    ) -> dict[str, Any] | None:
        """The answer, or None when it could not be had."""
        rest = (prompt, self._most, tokens, prompt.count(b",") + 1)
        labels = b'"custom_labels":{"output_tokens":"%d","prompt_tokens":"%d"}'
        body = b'{"input_ids":[%b],"sampling_params":{"max_new_tokens":%d},' + labels + b","
        body %= rest
        for number in range(TRIES):
            # A rid of its own: that of a try before may still be known.
            named = body + b'"rid":"seed-%d-%b-%d"}' % (self._seed, rid.encode(), number)
            try:
                async with session.post(self._url, data=named, headers=headers) as reply:
                    raw = await reply.read()
                    if reply.status == 200:
                        answer: dict[str, Any] = orjson.loads(raw)
                        return answer
            except aiohttp.ClientError:
                pass
            self._played.repeats += 1
            await asyncio.sleep(_PAUSE_S)
        return None

    def _count(self, meta: dict[str, Any]) -> None:
        self._played.prompt_tokens += meta["prompt_tokens"]
        self._played.cached_tokens += meta["cached_tokens"]
        self._played.retractions += meta["num_retractions"]
