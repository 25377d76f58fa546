"""Moves that meet an end, an abort, a pause, a loss, or a worker that does not carry on what it is given."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson
import pytest

from miles_router.tasks import cancelled, spawn
from tests.support.fleet import post, requests_of
from tests.support.http import RawReply
from tests.support.moving import SOON
from tests.support.resuming import ABORT, JSON, PROMPT, Engine, answer, engine, in_json, in_one, length, told
from tests.support.running_router import RunningRouter
from tests.support.scripted_worker import RESET, Behaviour, Step, Visit, chunk, chunked_head, reply, script
from tests.support.stage import Stage
from tests.support.waiting import soon, until

pytestmark = pytest.mark.alone("generations do not move to idler workers")

MODEL = script(reply(orjson.dumps({"weight_version": "1", "model_path": "m", "preferred_sampling_params": None})))
SERVER = script(reply(orjson.dumps({"context_length": 4096, "incremental_streaming_output": False})))
ABORT_PATH = "/abort_request"
#: As the client writes it.
BODY = b'{"input_ids": [1, 2],  "rid": "the-name-of-a-rollout", "sampling_params": {"ignore_eos": true}}'
CUT = answer([5, 6], ABORT, id="the-name-of-a-rollout", weight_version="1")
REST = answer([7], length(1), prompt=4, id="another", weight_version="1")
WHOLE = answer([8, 9], length(2), id="the-name-of-a-rollout", weight_version="1")


@dataclass
class MoveTrial:
    """A worker with a generation that is told to end, another that may take it over, and what its client gets."""

    router: RunningRouter
    source: Engine
    target: Engine
    told: list[Any]  # what the source was told to abort
    answered: asyncio.Event  # the source answers
    heeded: asyncio.Event  # it says that it has heard what it was told
    asking: asyncio.Task[RawReply]

    @property
    def unmoved(self) -> dict[str, int]:
        return dict(self.router.app.router.metrics.unmoved_generations)

    @property
    def moved(self) -> int:
        return self.router.app.router.metrics.moved_generations

    def under_way(self, rid: str) -> bool:
        """Whether the router has a request of this name."""
        bodies = [body for _, body in requests_of(self.router).requests()]
        return any(orjson.loads(body).get("rid") == rid for body in bodies if body)

    async def answer(self) -> RawReply:
        """What the client gets once the source has answered."""
        self.answered.set()
        return await soon(self.asking)


@asynccontextmanager
async def trial(
    stage: Stage,
    *reply: Step,
    body: bytes = BODY,
    late: bool = False,
    standing: Mapping[str, Behaviour] | None = None,
    **settings: Any,
) -> AsyncIterator[MoveTrial]:
    """A trial whose source has been told to abort the generation, and answers so when the test says; where it is
    `late`, so is that it has heard it. The target answers some paths as `standing` says."""
    source, target = await engine(stage), await engine(stage)
    heard: list[Any] = []
    answered, rest, heeded = asyncio.Event(), asyncio.Event(), asyncio.Event()
    if not late:
        heeded.set()
    for each in (source, target):
        each.worker.model_info = MODEL
        each.worker.standing["/server_info"] = SERVER
    target.worker.standing.update(standing or {})

    async def abort(visit: Visit) -> None:
        heard.append(orjson.loads(await visit.read_body()))
        await heeded.wait()
        await visit.write(in_json(b""))

    source.worker.standing[ABORT_PATH] = abort
    router = await stage.router(source.worker, **{"move_after": SOON, **settings})
    await router.probed()
    source.goes.append(script(rest, in_one([answer([1], length(1))])))
    keyed = orjson.dumps({"input_ids": PROMPT})
    staying = spawn(router.ask("POST", "/generate", [*JSON, ("X-Session-Id", "s")], keyed), name="one that stays")
    await until(lambda: len(source.asked) == 1, "it runs")
    source.goes.append(script(answered, *reply))
    asking = spawn(router.ask("POST", "/generate", JSON, body), name="one that moves")
    await until(lambda: len(source.asked) == 2, "both run")
    assert (await post(router, f"/add_worker?url={target.worker.url}")).status == 200
    await until(lambda: heard, "it is to move")
    try:
        yield MoveTrial(router, source, target, heard, answered, heeded, asking)
    finally:
        rest.set()
        answered.set()
        heeded.set()
        assert (await soon(staying)).json() == answer([1], length(1))
        await cancelled(asking)


def joined(came: RawReply) -> tuple[list[int], str, object]:
    said = came.json()
    return said["output_ids"], said["meta_info"]["id"], said["meta_info"]["finish_reason"]


CARRIED_ON = ([5, 6, 7], "the-name-of-a-rollout", length(3))


async def test_a_cut_answer_is_carried_on_and_its_client_never_sees_the_cut(stage: Stage) -> None:
    async with trial(stage, in_one([CUT])) as moving:
        moving.target.goes.append(told(REST))
        assert joined(await moving.answer()) == CARRIED_ON
        assert moving.target.asked[0]["input_ids"] == [1, 2, 5, 6]
        assert (moving.moved, moving.unmoved) == (1, {})
        assert moving.told == [{"rid": "the-name-of-a-rollout"}]


async def test_one_that_has_ended_before_it_was_told_comes_as_it_is(stage: Stage) -> None:
    said = in_json(b' {"text": "",' + orjson.dumps(WHOLE)[1:])
    async with trial(stage, said) as moving:
        came = await moving.answer()
        assert said.endswith(b"\r\n\r\n" + came.body), "byte for byte"
        assert (moving.moved, moving.unmoved) == (0, {"ended": 1})


@pytest.mark.parametrize("wish", [{"rid": "the-name-of-a-rollout"}, {"abort_all": True}])
async def test_an_abort_by_a_client_while_it_is_told_is_final(stage: Stage, wish: dict[str, Any]) -> None:
    async with trial(stage, in_one([CUT])) as moving:
        moving.source.worker.standing["/abort_request"] = script(in_json(b""))
        assert (await post(moving.router, "/abort_request", **wish)).status == 200
        assert (await moving.answer()).json() == CUT
        assert (moving.moved, moving.unmoved) == (0, {"aborted": 1})


async def test_a_pause_that_cuts_while_it_is_told_is_a_pause(stage: Stage) -> None:
    async with trial(stage, in_one([CUT])) as moving:
        assert (await post(moving.router, "/pause_generation", mode="abort")).status == 200
        assert (await moving.answer()).json() == CUT
        assert (await post(moving.router, "/continue_generation")).status == 200
        assert (moving.moved, moving.unmoved) == (0, {"aborted": 1})


async def test_under_resume_it_is_carried_on_after_that(stage: Stage) -> None:
    async with trial(stage, in_one([CUT]), partial_rollout="resume") as moving:
        assert (await post(moving.router, "/pause_generation", mode="abort")).status == 200
        moving.answered.set()
        await until(lambda: moving.router.app.router.gate.held, "it waits for the fleet to go on")
        for each in (moving.source, moving.target):
            each.goes.append(told(REST))
        assert (await post(moving.router, "/continue_generation")).status == 200
        assert joined(await moving.answer()) == CARRIED_ON


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_pause_that_cuts_nothing_lasts_between_two_workers_too(stage: Stage, mode: str) -> None:
    async with trial(stage, in_one([CUT])) as moving:
        assert (await post(moving.router, "/pause_generation", mode=mode)).status == 200
        moving.answered.set()
        await until(lambda: moving.router.app.router.gate.held, "it waits for the fleet to go on")
        assert moving.target.asked == []
        moving.target.goes.append(told(REST))
        assert (await post(moving.router, "/continue_generation")).status == 200
        assert joined(await moving.answer()) == CARRIED_ON


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/pause_generation", {"mode": "abort"}), (ABORT_PATH, {"rid": "the-name-of-a-rollout"})],
    ids=["a pause that cuts", "an abort"],
)
async def test_what_waits_between_two_workers_is_ended(stage: Stage, path: str, fields: dict[str, Any]) -> None:
    """Whoever paused waits for all that runs; a generation between two workers would not come before continue."""
    async with trial(stage, in_one([CUT])) as moving:
        assert (await post(moving.router, "/pause_generation", mode="in_place")).status == 200
        moving.answered.set()
        await until(lambda: moving.router.app.router.gate.held, "it waits for the fleet to go on")
        assert (await post(moving.router, path, **fields)).status == 200
        assert (await soon(moving.asking)).json() == CUT
        assert (await post(moving.router, "/continue_generation")).status == 200


async def test_request_confusable_with_a_moving_one_waits_for_its_abort(stage: Stage) -> None:
    """A client goes on under the same name, or a longer one: nobody has asked for that to be aborted."""
    at_home = [*JSON, ("X-Session-Id", "s")]
    async with trial(stage, in_json(orjson.dumps(WHOLE)), late=True) as moving:
        moving.source.goes += [told(WHOLE), told(REST)]
        assert (await moving.answer()).json() == WHOLE
        alike = spawn(moving.router.ask("POST", "/generate", at_home, BODY.replace(b"rollout", b"rollout-2")), name="a")
        await until(lambda: moving.under_way("the-name-of-a-rollout-2"), "it is there")
        other = await moving.router.ask("POST", "/generate", at_home, BODY.replace(b"the-", b"a-"))
        assert other.json() == WHOLE
        assert [each.get("rid") for each in moving.source.asked[2:]] == ["a-name-of-a-rollout"]
        moving.heeded.set()
        assert (await soon(alike)).json() == REST


async def test_one_that_waits_for_that_can_be_aborted(stage: Stage) -> None:
    async with trial(stage, in_json(orjson.dumps(WHOLE)), late=True) as moving:
        assert (await moving.answer()).json() == WHOLE
        alike = spawn(moving.router.ask("POST", "/generate", JSON, BODY), name="a")
        await until(lambda: moving.under_way("the-name-of-a-rollout"), "it is there")
        moving.source.worker.standing[ABORT_PATH] = script(in_json(b""))
        assert (await post(moving.router, ABORT_PATH, rid="the-name-of-a-rollout")).status == 200
        moving.heeded.set()
        assert (await soon(alike)).json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(moving.source.asked) == 2


async def test_an_abort_finds_one_whose_next_worker_is_asked_what_it_is(stage: Stage) -> None:
    async with trial(stage, in_one([CUT])) as moving:
        asked, go = asyncio.Event(), asyncio.Event()

        async def slow(visit: Visit) -> None:
            asked.set()
            await go.wait()
            await visit.write(reply(orjson.dumps({"context_length": 4096})))

        moving.target.worker.standing["/server_info"] = slow
        moving.router.pool.get(moving.target.worker.url).facts = None
        moving.answered.set()
        await soon(asked.wait())
        moving.source.worker.standing[ABORT_PATH] = script(in_json(b""))
        assert (await post(moving.router, ABORT_PATH, rid="the-name-of-a-rollout")).status == 200
        go.set()
        assert (await soon(moving.asking)).json() == CUT
        assert moving.target.asked == []


async def test_one_waits_for_a_worker_that_has_not_said_all_about_itself_yet(stage: Stage) -> None:
    """It was found to be too long for one whose context nobody knew yet, and stayed for good."""
    schemas = iter([script(RESET), script(RESET)])

    async def schema(visit: Visit) -> None:
        await next(schemas, script(reply(b"{}")))(visit)

    standing = {"/openapi.json": schema}
    async with trial(stage, in_one([CUT]), standing=standing, health_check_interval=0.2) as moving:
        assert moving.unmoved == {}
        assert next(schemas, None) is None
        moving.target.goes.append(script(in_one([REST])))
        await moving.answer()
        assert moving.moved == 1


async def test_an_aborted_one_that_is_lost_is_not_asked_for_anew(stage: Stage) -> None:
    async with trial(stage, chunked_head(JSON), chunk(b'{"text": "'), RESET) as moving:
        moving.source.worker.standing[ABORT_PATH] = script(in_json(b""))
        assert (await post(moving.router, ABORT_PATH, rid="the-name-of-a-rollout")).status == 200
        assert (await moving.answer()).status == 502
        assert len(moving.source.asked) == 2


async def test_a_client_that_leaves_between_two_workers_ends_it(stage: Stage) -> None:
    async with trial(stage, in_one([CUT])) as moving:
        assert (await post(moving.router, "/pause_generation", mode="in_place")).status == 200
        moving.answered.set()
        await until(lambda: moving.router.app.router.gate.held, "it waits for the fleet to go on")
        await cancelled(moving.asking)
        await until(lambda: not moving.router.app.router.gate.held, "it has ended")
        assert (await post(moving.router, "/continue_generation")).status == 200
        assert moving.target.asked == []


# Who does not carry it on

REFUSALS: dict[str, Behaviour] = {
    "too long": script(in_json(b'{"error": {"message": "too long"}}', 400)),
    "overloaded": script(in_json(b"{}", 503)),
    "no JSON": script(in_json(b"{")),
    "no meta_info": told({"text": "x", "output_ids": [7]}),
    "a prompt that was cut": told(answer([7], length(1), prompt=2, weight_version="1")),
    "no versions": told(answer([7], length(1), prompt=4, weight_versions=["1"])),
    "lost before": script(RESET),
    "lost inside": script(chunked_head(JSON), chunk(b"{"), RESET),
}


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
async def test_where_one_does_not_carry_it_on_it_goes_back_to_the_worker_that_had_it(
    stage: Stage, refusal: Behaviour
) -> None:
    async with trial(stage, in_one([CUT]), max_retries=0) as moving:
        moving.target.goes += [refusal, refusal]  # on a kept connection it is asked twice
        moving.source.goes.append(told(REST))
        assert joined(await moving.answer()) == CARRIED_ON
        assert moving.source.asked[2]["input_ids"] == [1, 2, 5, 6]


CUTS: dict[str, tuple[Step, ...]] = {
    "contradicts itself": (in_one([{**CUT, "meta_info": {**CUT["meta_info"], "completion_tokens": 7}}]),),
    "compressed": (reply(gzip.compress(orjson.dumps(CUT)), 200, [*JSON, ("Content-Encoding", "gzip")]),),
    "no JSON": (in_json(b"{"),),
    "an error": (in_json(b'{"error": {"message": "aborted"}}', 400),),
    "lost": (chunked_head(JSON), chunk(b'{"text": "'), RESET),
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
async def test_a_cut_answer_that_cannot_be_read_is_asked_for_anew_as_it_was(
    stage: Stage, cut: tuple[Step, ...]
) -> None:
    async with trial(stage, *cut) as moving:
        moving.source.goes.append(told(WHOLE))
        came = await moving.answer()
        assert came.json() == WHOLE
        # Its worker may still have the name of what was refused or lost: the repeat has another there.
        asked = [{**each, "rid": orjson.loads(BODY)["rid"]} for each in moving.source.asked[1:]]
        assert asked == [orjson.loads(BODY)] * 2
        assert (moving.moved, moving.unmoved) == (0, {"begun_anew": 1})


async def test_an_answer_that_is_too_large_to_be_held_is_asked_for_anew_and_passes(stage: Stage) -> None:
    async with trial(stage, in_one([WHOLE]), max_answer_bytes=100) as moving:
        moving.source.goes.append(told(WHOLE))
        assert (await moving.answer()).json() == WHOLE
        assert (moving.moved, moving.unmoved) == (0, {"begun_anew": 1})


async def test_what_is_asked_for_anew_moves_no_more(stage: Stage) -> None:
    async with trial(stage, in_json(b"{")) as moving:
        over = asyncio.Event()
        moving.source.goes.append(script(over, in_one([WHOLE])))
        moving.answered.set()
        await until(lambda: len(moving.source.asked) == 3, "it runs again")
        await asyncio.sleep(5 * SOON)  # nothing tells that none has moved
        assert len(moving.told) == 1
        over.set()
        assert (await moving.answer()).json() == WHOLE


async def test_what_nobody_carries_on_is_asked_for_anew_as_it_was(stage: Stage) -> None:
    async with trial(stage, in_one([CUT])) as moving:
        no = script(in_json(b'{"error": {"message": "no"}}', 400))
        moving.target.goes.append(no)
        moving.source.goes += [no, no, told(WHOLE)]
        assert (await moving.answer()).json() == WHOLE
        assert moving.unmoved == {"begun_anew": 1}


async def test_where_no_worker_is_left_it_waits_for_one(stage: Stage) -> None:
    async with trial(stage, in_one([CUT])) as moving:
        for each in (moving.source, moving.target):
            await post(moving.router, f"/remove_worker?url={each.worker.url}")
        moving.answered.set()
        await until(lambda: moving.moved, "it was to go on")
        moving.source.goes.append(told(REST))
        assert (await post(moving.router, f"/add_worker?url={moving.source.worker.url}")).status == 200
        assert joined(await moving.answer()) == CARRIED_ON
