"""An episode's contract on a real SGLang: what runs ends there when nobody wants it any more, and a turn is cut to what
its context still holds, and refused, before the engine is asked."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import orjson
import pytest

from tests.sglang_worker import RealWorker
from tests.support.cuts import continue_, pause
from tests.support.http import RawReply, ask, whole_or_cut
from tests.support.real_sessions import real_sessions
from tests.support.recording_proxy import RecordingProxy
from tests.support.session_apis import MESSAGES, RESPONSES, Api
from tests.support.session_trial import CHAT, SessionTrial, exactly_through, message_of, user
from tests.support.under_way import under_way
from tests.support.waiting import until

pytestmark = pytest.mark.sglang

#: Longer than any test; what nobody ends is broken off with its router.
ENDLESS: Any = {"ignore_eos": True}
LONGEST, WINDOW = 16_000, 20_000
both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
agent_apis = pytest.mark.parametrize(
    ("api", "stream"),
    [(Api(CHAT), False), (Api(CHAT), True), (Api(MESSAGES), True), (Api(RESPONSES), True)],
    ids=["chat, whole", "chat", "messages", "responses"],
)


class Scene:
    """A router with sessions before an engine behind a proxy."""

    def __init__(self, trial: SessionTrial, worker: RealWorker, proxy: RecordingProxy) -> None:
        self.trial = trial
        self.worker = worker
        self.proxy = proxy

    async def running(self) -> int:
        """Generations that the engine has."""
        loads = orjson.loads((await ask(self.worker.url, "GET", "/v1/loads")).body)["loads"]
        return int(sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads))

    async def becomes(self, count: int) -> None:
        """Until the engine has so many."""
        while await self.running() != count:
            pass

    async def ask(self, api: Api, session: str, **fields: Any) -> RawReply:
        """A turn without an end, and what came of it."""
        return await whole_or_cut(api.ask(self.trial, session, LONGEST, **ENDLESS, **fields))

    @property
    def asked(self) -> int:
        """Turns that have come to the engine."""
        return sum(exchange.path == CHAT for exchange in self.proxy.exchanges)

    @property
    def aborted(self) -> set[str]:
        """What the engine was told to abort."""
        return {orjson.loads(each.body)["rid"] for each in self.proxy.exchanges if each.path == "/abort_request"}

    @property
    def rids(self) -> set[str]:
        """How its turns are called there."""
        return {orjson.loads(each.body)["rid"] for each in self.proxy.exchanges if each.path == CHAT}


@pytest.fixture(scope="module")
def worker() -> Iterator[RealWorker]:
    with RealWorker.start("--reasoning-parser", "qwen3", "--context-length", str(WINDOW)) as started:
        yield started


@pytest.fixture
async def scene(worker: RealWorker) -> AsyncIterator[Scene]:
    async with real_sessions(worker) as (trial, proxy):
        await until(lambda: trial.router.pool.weight_version is not None, "the probe has passed")
        made = Scene(trial, worker, proxy)
        yield made
        await made.becomes(0)


@both
async def test_a_session_that_is_deleted_leaves_its_engine_nothing_to_do(scene: Scene, stream: bool) -> None:
    session = await scene.trial.create()
    async with under_way(scene.ask(Api(CHAT), session, stream=stream)) as turn:
        await scene.becomes(1)
        assert (await scene.trial.ask("DELETE", f"/sessions/{session}?abort=true")).status == 204
        reply = await turn
    assert (reply.status == 404) or (stream and b"[DONE]" not in reply.body)
    assert scene.aborted == scene.rids, "it does not wait until the engine looks for its client"


@both
async def test_a_group_ends_at_its_engine_and_leaves_what_it_has(scene: Scene, stream: bool) -> None:
    for group in map(str, range(16)):  # the first that is not aborted before it has a token
        session = await scene.trial.create(contract={"group": group})
        async with under_way(scene.ask(Api(CHAT), session, stream=stream)) as turn:
            await scene.becomes(1)
            assert (await scene.trial.ask("POST", "/abort_request", {"group": group})).status == 200
            await turn
        await scene.becomes(0)
        *_, generation = scene.proxy.chats(version="default")
        samples = await scene.trial.samples(session)
        assert bool(samples) == bool(generation.sampled)
        if samples:
            break
    (sample,) = samples
    exactly_through(sample, [generation])
    assert (sample["status"], sample["metadata"]["end_reason"]) == ("aborted", "aborted")


@both
async def test_a_deadline_ends_the_turn_at_its_engine(scene: Scene, stream: bool) -> None:
    for seconds in (1.0, 8.0, 64.0):  # the first that is long enough for a token
        session = await scene.trial.create(contract={"budget": {"deadline_s": seconds}})
        await scene.ask(Api(CHAT), session, stream=stream)
        if await scene.trial.samples(session):
            break
    (sample,) = await scene.trial.samples(session)
    *_, last = scene.proxy.chats(version="default")
    exactly_through(sample, [last])
    assert (sample["status"], sample["metadata"]["end_reason"]) == ("aborted", "deadline")


@agent_apis
async def test_a_turn_is_cut_to_what_its_context_holds_to_the_token(scene: Scene, api: Api, stream: bool) -> None:
    session = await scene.trial.create(contract={"budget": {"max_context": 90}})
    assert (await scene.ask(api, session, stream=stream)).status == 200
    (generation,) = scene.proxy.chats(version="default")
    assert len(generation.prompt) + len(generation.sampled) == 90, "the engine counts as it was counted here"
    refused = await scene.ask(api, session, text="word " * 100, stream=stream)
    assert api.refusal(refused, stream=stream)[0] == "context_length_exceeded"
    assert scene.asked == 1, "told before the engine is asked"
    (sample,) = await scene.trial.samples(session)
    assert (len(sample["tokens"]), sample["metadata"]["end_reason"]) == (90, "context")


async def test_turns_that_go_on_are_counted_exactly_too(scene: Scene) -> None:
    session = await scene.trial.create(contract={"budget": {"max_context": 150, "max_tokens": 100}})
    history: list[Any] = [user("Hi")]
    for _ in range(2):
        answer = await scene.trial.chat(session, history, max_tokens=40, ignore_eos=True)
        history += [message_of(answer), user("Go on, please")]
    last = await scene.trial.turn(session, history, max_tokens=1000, ignore_eos=True)
    assert last.status == 200
    *_, generation = scene.proxy.chats(version="default")
    tokens = len(generation.prompt) + len(generation.sampled)
    assert len(generation.sampled) == 20 or tokens == 150
    (sample,) = await scene.trial.samples(session)
    assert sample["metadata"]["end_reason"] in ("budget_tokens", "context")
    assert (len(sample["tokens"]), sum(sample["loss_mask"])) == (tokens, 80 + len(generation.sampled))


async def test_under_a_budget_the_engine_s_own_window_is_no_obstacle(scene: Scene) -> None:
    api = Api(CHAT)
    session = await scene.trial.create(contract={"budget": {"max_tokens": 10 * WINDOW}})
    reply = await api.ask(scene.trial, session, 2 * WINDOW, stop_token_ids=list(range(2000)), stream=False)
    assert reply.status == 200, reply.body
    refused = await api.ask(scene.trial, session, 1, "word " * WINDOW)
    assert api.refusal(refused)[0] == "context_length_exceeded"
    assert scene.asked == 1


async def test_an_evaluation_has_one_version_however_its_weights_change(scene: Scene) -> None:
    trial = scene.trial
    try:
        for version, (mode, stream) in enumerate(itertools.product(("abort", "retract"), (False, True)), 1):
            session = await trial.create(evaluation=True)
            most = LONGEST if mode == "abort" else 2000
            asked = whole_or_cut(Api(CHAT).ask(trial, session, most, stream=stream, **ENDLESS))
            async with under_way(asked) as turn:
                await scene.becomes(1)
                await pause(trial, mode)
                await continue_(trial, str(version))
                reply = await turn
            assert (reply.status == 409) or (stream and b"evaluation" in reply.body), (mode, stream, reply.body[-300:])
            assert b'"finish_reason":"abort"' not in reply.body
            assert await trial.records(session) == []
            assert (await Api(CHAT).ask(trial, session, 4)).status == 200, "it begins again"
            (sample,) = await trial.samples(session)
            assert [run["version"] for run in sample["weight_versions"]] == [str(version)]
    finally:
        await pause(trial, "abort")
        await continue_(trial, "default")
