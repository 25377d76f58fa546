"""Turns of agents on a real SGLang that says what a script wants: cut by a pause in their text, their reasoning and
their calls, given new weights, and carried on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sglang_worker import RealWorker
from tests.support.chat_turns import plain, read_stream
from tests.support.cuts import ScriptedCut, new_version
from tests.support.generations import Generation
from tests.support.real_sessions import real_sessions, write_script
from tests.support.recording_proxy import RecordingProxy
from tests.support.session_trial import ADD, ASK_ADD, IM_END, SessionTrial, message_of, qwen3, user
from tests.support.tiers import size
from tests.support.waiting import soon

pytestmark = pytest.mark.sglang

FIRST_VERSION = "default"
HI = [user("What is 17 + 25?")]
REASONING = "<think>\nI add < both </ of them.\n</think>\n\n"
ANSWERS = {
    "text": "<think>\n\n</think>\n\nI say, naïve 世界 😀, that <tool it is\n\n42.",
    "reasoning": f"{REASONING}It is 42.",
    "calls": f"{REASONING}I add.\n{ASK_ADD}\n{ASK_ADD}",
}


class Scene:
    """A router with sessions before a scripted engine behind a proxy."""

    def __init__(self, trial: SessionTrial, worker: RealWorker, proxy: RecordingProxy, script: Path) -> None:
        self.trial = trial
        self.proxy = proxy
        self.script = script
        self.cut = ScriptedCut(trial, worker, script)
        self.version = 0

    async def turn(self, text: str, cut: int | None, **fields: Any) -> tuple[Any, Any, list[Generation]]:
        """A turn that says this, cut before one of its tokens: its answer, its sample, and how it was generated."""
        write_script(self.script, text)
        if cut is not None:
            self.cut.before(cut)
        session = await self.trial.create()
        asking = self.trial.stream if fields.get("stream") else self.trial.chat
        fields.pop("stream", None)
        asked = asyncio.ensure_future(asking(session, HI, max_tokens=500, tools=[ADD], **fields))
        if cut is not None:
            self.version += 1
            await self.cut.update(str(self.version))
        answer = await soon(asked)
        (sample,) = await self.trial.samples(session)
        legs = [each for each in self.proxy.chats(version=FIRST_VERSION) if each.session == session]
        return answer, sample, legs


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RealWorker, Path]]:
    script = tmp_path_factory.mktemp("scripted") / "script.json"
    with RealWorker.start("--reasoning-parser", "qwen3", "--script-file", str(script)) as worker:
        yield worker, script


@pytest.fixture
async def scene(engine: tuple[RealWorker, Path]) -> AsyncIterator[Scene]:
    worker, script = engine
    async with real_sessions(worker, partial_rollout="resume") as (trial, proxy):
        yield Scene(trial, worker, proxy, script)
        await new_version(trial, FIRST_VERSION)  # of the next scene


def places(text: str) -> list[int]:
    """Where an answer is cut: everywhere, or behind most of it."""
    count = len(qwen3().encode(text))
    return size(heavy=list(range(count)), otherwise=[count * 2 // 3])


def check(sample: Any, legs: list[Generation], text: str) -> None:
    first, second = legs
    ids = [*qwen3().encode(text), IM_END]
    assert [*first.sampled, *second.sampled] == ids
    prompt = len(sample["tokens"]) - len(ids)
    assert second.given == sample["tokens"][: prompt + len(first.sampled)]
    assert sample["tokens"][prompt:] == ids
    assert sample["loss_mask"] == [0] * prompt + [1] * len(ids)
    assert sample["logprobs"][prompt:] == pytest.approx([*first.logprobs, *second.logprobs], abs=1e-6)
    before, after = sample["weight_versions"]
    assert (before["start"], before["end"]) == (prompt, prompt + len(first.sampled))
    assert (after["start"], after["end"]) == (prompt + len(first.sampled), len(sample["tokens"]))
    assert before["version"] != after["version"]


def shown(chunks: Any) -> Any:
    """What a stream has shown, but for line ends behind its text: on a busy machine the engine hands several tokens on
    at once, and its parser shows or swallows what stands between two calls as they come."""
    streamed = read_stream(chunks)
    return streamed._replace(message={**streamed.message, "content": (streamed.message["content"] or "").rstrip("\n")})


@pytest.mark.parametrize("name", size(heavy=list(ANSWERS), otherwise=["calls"]))
async def test_a_whole_answer_goes_on(scene: Scene, name: str) -> None:
    text = ANSWERS[name]
    uncut, _, _ = await scene.turn(text, None)
    for cut in places(text):
        answer, sample, legs = await scene.turn(text, cut)
        check(sample, legs, text)
        assert plain(message_of(answer)) == plain(message_of(uncut)), cut
        assert answer["choices"][0]["finish_reason"] == uncut["choices"][0]["finish_reason"]
        assert answer["usage"] == uncut["usage"]


@pytest.mark.parametrize("name", ANSWERS)
async def test_a_stream_goes_on(scene: Scene, name: str) -> None:
    text, fields = ANSWERS[name], {"stream": True, "stream_options": {"include_usage": True}}
    uncut, _, _ = await scene.turn(text, None, **fields)
    for cut in places(text):
        answer, sample, legs = await scene.turn(text, cut, **fields)
        check(sample, legs, text)
        assert shown(answer) == shown(uncut), cut
