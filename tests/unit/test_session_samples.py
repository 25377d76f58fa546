"""Samples: what was given and sampled along a line, exactly, in JSON and safetensors; or none, and why."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import orjson
import pytest
from starlette.requests import Request

from middleware_hub.openai_session.archive.archive import SessionArchive
from middleware_hub.openai_session.errors import UnusableSample
from middleware_hub.openai_session.export.routes import SessionRoutes
from middleware_hub.openai_session.export.samples import SampleMaker, SamplePlan, SampleRequest
from middleware_hub.openai_session.export.selection import Selection
from middleware_hub.openai_session.sessions.turn import Turn
from miles_router.errors import BadRequest, ClientDisconnected
from miles_router.middlewares import Message, Router
from miles_router.middlewares.rows import RowChannel
from miles_router.settings.config import RouterConfig
from miles_router.tasks import spawn
from miles_router.trajectory import Sample, Trajectory, from_arrays
from miles_router.trajectory.rows import KINDS
from miles_router.trajectory.safetensors import unpack
from miles_router.trajectory.sample import READERS, Format
from tests.support.sessions import SYSTEM, Scene, user
from tests.support.waiting import PATIENCE, until

START = [SYSTEM, user("Add.")]
CHANNELS = {kind: RowChannel(kind) for kind in KINDS}
PROMPT = 3  # of a root, in tokens


def decode(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def planned(scene: Scene, **request: Any) -> SamplePlan:
    maker = SampleMaker(Selection(()), decode, CHANNELS)
    return maker.plan(scene.session, SampleRequest.read(request))


def collected(scene: Scene, **request: Any) -> list[Sample]:
    return planned(scene, **request).make()


def one(scene: Scene, **request: Any) -> Sample:
    (sample,) = collected(scene, **request)
    return sample


def trajectory(sample: Sample) -> Trajectory:
    return from_arrays(sample.tokens, sample.logprobs, sample.loss_mask, sample.weight_versions)


def two_turns(scene: Scene, **options: Any) -> Turn:
    """3 given, 4 sampled, of which the last is dropped, 5 given, 2 sampled: [0,3) [3,6) [6,11) [11,13)."""
    first = scene.turn(START, sampled=4)
    return scene.follow(first, user("b"), given=5, dropped=1, sampled=2, **options)


# The request


def test_a_request_for_samples_may_leave_everything_out() -> None:
    assert SampleRequest.read({}) == SampleRequest("json", None, "", {}, {})


def test_a_request_for_samples_says_what_it_wants() -> None:
    request = {"format": "safetensors", "max_seq_len": 1, "branches": "last", "reward": None, "metadata": {"a": 1}}
    assert SampleRequest.read(request) == SampleRequest("safetensors", 1, "last", {"reward": None}, {"a": 1})


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ([], "must be a JSON object"),
        ({"formt": "json"}, "unknown field 'formt'"),
        ({"format": "pickle"}, "format must be one of"),
        ({"format": ["json"]}, "format must be one of"),
        ({"format": None}, "format must be one of"),
        ({"max_seq_len": 0}, "max_seq_len"),
        ({"max_seq_len": True}, "max_seq_len"),
        ({"max_seq_len": 1.0}, "max_seq_len"),
        ({"metadata": []}, "metadata must be an object"),
    ],
)
def test_a_request_that_is_not_understood_is_refused(request_: object, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        SampleRequest.read(request_)


def test_a_policy_that_there_is_not_is_refused() -> None:
    with pytest.raises(BadRequest, match="branches must be"):
        collected(Scene(), branches="best")


# A sample


def test_a_sample_is_the_line_of_its_leaf() -> None:
    scene = Scene()
    leaf = two_turns(scene)
    sample = one(scene)
    assert trajectory(sample) == leaf.trajectory()
    assert sample.loss_mask.tolist() == [0] * 3 + [1] * 3 + [0] * 5 + [1] * 2
    assert sample.weight_versions == (("1", 3, 6), ("1", 11, 13))
    assert sample.response == decode(leaf.trajectory().tokens[PROMPT:].tolist())
    assert sample.response_length == 10


def test_a_sample_says_where_its_turns_are() -> None:
    scene = Scene()
    two_turns(scene)
    metadata = one(scene).metadata
    assert [(turn["turn"], turn["start"], turn["end"]) for turn in metadata["turns"]] == [(0, 3, 6), (1, 11, 13)]
    assert (metadata["session_id"], metadata["leaf"], metadata["untrained_turns"]) == ("s", 1, [])
    assert (metadata["reason"], metadata["untraced"]) == (None, 0)


@pytest.mark.parametrize(
    ("finish", "status"),
    [("stop", "completed"), ("tool_calls", "completed"), ("length", "truncated"), ("abort", "aborted")],
)
def test_the_status_is_how_the_last_turn_ended(finish: str, status: str) -> None:
    scene = Scene()
    two_turns(scene, finish=finish)
    assert one(scene).status == status


def test_what_is_given_at_collection_is_carried() -> None:
    scene = Scene()
    scene.session.metadata.update(task="sum", source="session")
    scene.turn(START)
    sample = one(scene, reward=0.5, label=[1], metadata={"source": "collection"})
    assert (sample.reward, sample.label) == (0.5, [1])
    assert (sample.metadata["task"], sample.metadata["source"]) == ("sum", "collection")
    (plain,) = orjson.loads(planned(scene).write())["samples"]
    assert not {"reward", "label"} & plain.keys()
    (null,) = orjson.loads(planned(scene, label=None).write())["samples"]
    assert (null["label"], "reward" in null) == (None, False)


def test_nobody_s_metadata_hides_what_the_router_says() -> None:
    scene = Scene()
    scene.session.metadata["leaf"] = "mine"
    scene.turn(START)
    assert one(scene, metadata={"session_id": "mine", "turns": 3}).metadata["leaf"] == 0
    assert one(scene, metadata={"session_id": "mine", "turns": 3}).metadata["session_id"] == "s"


# Branches


def test_each_leaf_gives_a_sample_and_a_shared_turn_is_trained_once() -> None:
    scene = Scene()
    first = scene.turn(START, sampled=2)
    leaves = [scene.follow(first, user(text), given=1, sampled=2) for text in "bc"]
    one, other = collected(scene)
    assert [sample.tokens.tolist() for sample in (one, other)] == [leaf.trajectory().tokens.tolist() for leaf in leaves]
    assert one.loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 1, 1]
    assert other.loss_mask.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert other.logprobs.tolist()[3:5] == one.logprobs.tolist()[3:5] != [0.0, 0.0]
    assert [sample.metadata["untrained_turns"] for sample in (one, other)] == [[], [0]]
    assert [sample.metadata["reason"] for sample in (one, other)] == [None, "edited_history"]


def test_alone_a_branch_trains_all_of_its_turns() -> None:
    scene = Scene()
    first = scene.turn(START, sampled=2)
    for text in "bc":
        scene.follow(first, user(text), given=1, sampled=2)
    assert one(scene, branches="last").loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 1, 1]


def test_a_stop_token_that_one_line_dropped_is_trained_in_the_other() -> None:
    scene = Scene()
    first = scene.turn(START, sampled=2)
    scene.follow(first, user("b"), given=1, dropped=1, sampled=1)
    scene.follow(first, user("c"), given=1, sampled=1)
    one, other = collected(scene)
    assert one.loss_mask.tolist() == [0, 0, 0, 1, 0, 1]
    assert other.loss_mask.tolist() == [0, 0, 0, 0, 1, 0, 1]
    assert other.metadata["untrained_turns"] == []


def test_the_reason_of_a_sample_is_the_first_along_its_line() -> None:
    scene = Scene()
    scene.turn(START)
    helper = scene.turn([user("else")])
    scene.follow(helper, user("b"))
    scene.follow(helper, user("c"))
    assert [sample.metadata["reason"] for sample in collected(scene)] == [None, "sub_agent", "sub_agent"]


def test_a_session_without_turns_gives_no_samples() -> None:
    scene = Scene()
    assert collected(scene) == []
    assert orjson.loads(planned(scene).write()) == {
        "samples": [],
        "metadata": {"session_id": "s", "turns": 0, "segments": 0, "untraced": []},
    }


def test_a_turn_that_was_aborted_before_its_first_token_gives_no_sample() -> None:
    scene = Scene()
    scene.turn(START, "", sampled=0, stop=False, finish="abort", versions=[])
    assert collected(scene) == []
    again = scene.turn(START, sampled=2)
    scene.follow(again, user("b"), given=1, sampled=0, stop=False, finish="abort", versions=[])
    sample = one(scene)
    assert (len(sample), sample.status) == (6, "aborted")
    assert [turn["turn"] for turn in sample.metadata["turns"]] == [1]


# Cut at a length


@pytest.mark.parametrize("length", range(PROMPT + 1, 15))
def test_a_sample_is_cut_anywhere_behind_its_prompt(length: int) -> None:
    scene = Scene()
    whole = two_turns(scene).trajectory()
    sample = one(scene, max_seq_len=length)
    assert trajectory(sample) == whole[:length]
    assert sample.status == ("truncated" if length < 13 else "completed")
    assert sample.response_length == min(length, 13) - PROMPT
    assert sample.response == decode(whole.tokens[PROMPT:length].tolist())
    spans = [(turn["start"], turn["end"]) for turn in sample.metadata["turns"]]
    assert spans == [(start, min(end, length)) for start, end in ((3, 6), (11, 13)) if start < length]
    assert all(run.end <= length for run in sample.weight_versions)


def test_a_sample_that_was_aborted_exactly_at_the_length_is_not_cut() -> None:
    scene = Scene()
    two_turns(scene, finish="abort")
    assert one(scene, max_seq_len=13).status == "aborted"
    assert one(scene, max_seq_len=12).status == "truncated"


@pytest.mark.parametrize("length", range(1, PROMPT + 1))
def test_a_sample_of_a_prompt_alone_is_refused(length: int) -> None:
    scene = Scene()
    two_turns(scene)
    with pytest.raises(UnusableSample, match="has_a_response: turn 1: the first prompt alone has 3 tokens") as refused:
        collected(scene, max_seq_len=length)
    assert (refused.value.status, refused.value.invariant) == (422, "has_a_response")


def test_a_sample_whose_versions_are_told_in_part_is_refused() -> None:
    scene = Scene()
    first = scene.turn(START)
    scene.follow(first, user("b"), versions=[])
    with pytest.raises(UnusableSample, match="versions_cover_the_loss") as refused:
        collected(scene)
    assert refused.value.invariant == "versions_cover_the_loss"


def test_a_sample_whose_engine_tells_no_versions_has_none() -> None:
    scene = Scene()
    scene.turn(START, versions=[])
    assert one(scene).weight_versions == ()


# On the wire

LOGPROBS = np.array([-0.1, -1e-9, -12.092743873596191, -0.0, -3.4e38, -1e-40], dtype=np.float32)


def of_hard_logprobs() -> Scene:
    scene = Scene()
    asked = scene.ask(START)
    generated = scene.generated(asked, "ok", sampled=len(LOGPROBS))
    generated.logprobs = LOGPROBS.tolist()
    scene.record(asked, generated)
    scene.follow(scene.session.turns[0], user("b"))
    return scene


def bits(logprobs: Any) -> list[int]:
    found: list[int] = np.asarray(logprobs, dtype=np.float32).view(np.int32).tolist()
    return found


@pytest.mark.parametrize("form", ["json", "safetensors"])
def test_every_form_gives_every_array_exactly(form: Format) -> None:
    scene = of_hard_logprobs()
    scene.turn([user("else")])
    found = collected(scene)
    read = READERS[form](planned(scene, format=form).write())
    assert [trajectory(sample) for sample in read] == [leaf.trajectory() for leaf in scene.session.leaves()]
    assert bits(read[0].logprobs[3:9]) == bits(LOGPROBS)
    assert [sample.metadata for sample in read] == [sample.metadata for sample in found]


def test_beside_the_samples_stands_what_is_true_of_the_session() -> None:
    scene = of_hard_logprobs()
    scene.turn([user("else")])
    scene.session.metadata["task"] = 7
    told = {"task": 7, "session_id": "s", "turns": 3, "segments": 2, "untraced": []}
    assert orjson.loads(planned(scene).write())["metadata"] == told
    assert orjson.loads(unpack(planned(scene, format="safetensors").write())[1]["metadata"]) == told


# Beside the event loop


async def test_samples_are_written_one_by_one_and_not_for_a_client_that_left() -> None:
    store = Scene().store
    archive = SessionArchive(
        store,
        cast(Router, SimpleNamespace(store=None, rows={}, config=RouterConfig())),
        now=lambda: 0.0,
        clock=lambda: 0.0,
    )
    routes = SessionRoutes(store, archive, cast(SampleMaker, None), lambda scope: "", lambda session, reason: None)
    go_on, begun = threading.Event(), list[str]()

    async def stays() -> Message:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def leaves() -> Message:
        return {"type": "http.disconnect"}

    def one() -> bool:
        begun.append("one")
        return go_on.wait(PATIENCE)

    writing = spawn(routes.run_in_thread(Request({"type": "http"}, stays), one), name="one")
    await until(lambda: begun, "the first is begun")
    with pytest.raises(ClientDisconnected):
        await routes.run_in_thread(Request({"type": "http"}, leaves), lambda: begun.append("another"))
    go_on.set()
    assert await writing
    assert begun == ["one"]
