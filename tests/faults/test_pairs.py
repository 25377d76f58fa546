"""A pair that loses a half, is cut, aborted or updated: nothing is lost, nothing looks complete, and the other half's
engine is not left with what nobody will come for."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import orjson
import pytest

from miles_router.fleet.workers import WorkerState
from miles_router.testing import PauseMode
from miles_router.testing.worker.model.moe import route
from tests.support.events import events_of
from tests.support.fleet import PROBING, becomes
from tests.support.http import RawReply, request, whole_or_cut
from tests.support.pairs import JSON, MOE, PROMPT, SHORT, TELLING, Halves, halves, register
from tests.support.running_router import processes_used
from tests.support.simulated.half_worker import HalfWorker
from tests.support.simulated.pairing import Pairing
from tests.support.stage import Stage
from tests.support.under_way import under_way
from tests.support.waiting import until

whole_and_streamed = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def last(reply: RawReply, *, stream: bool) -> Any:
    assert reply.status == 200, reply.body
    return events_of(reply.body)[-1] if stream else reply.json()


async def control(pair: Halves, path: str, status: int = 200, **body: Any) -> RawReply:
    reply = await pair.post(path, **body)
    assert reply.status == status, (path, reply.body)
    return reply


# Losses


@whole_and_streamed
async def test_a_lost_prefill_half_is_replaced_and_the_decode_half_serves(stage: Stage, stream: bool) -> None:
    async with halves(stage, prefills=2) as pair:
        pair.prefills[0].faults.close(path="/generate", times=None)
        pair.prefills[1].faults.reset_in_headers(path="/generate", times=None)
        reply = await pair.generate(stream=stream)
        assert (reply.status, reply.error_type) == (502, "upstream_unreachable")
        pair.prefills[1].faults.clear()
        for _ in range(4):  # a kept connection that is lost is tried again without a word
            assert (await pair.answer(stream=stream))["output_ids"] == pair.truth().output_ids
        heard = 1 if processes_used() == 1 else 0  # a process may hear from another that it is lost
        assert pair.router.app.router.metrics.retries >= 1 + heard
        assert pair.router.pool.get(pair.decode.url).failures == 0
        await pair.free()


async def test_a_prefill_half_that_dies_under_a_prompt_is_replaced(stage: Stage) -> None:
    async with halves(stage, prefills=2) as pair:
        pair.hold(pair.prefills)
        generating = pair.generating()
        await pair.prefilling()
        dying = next(worker for worker in pair.prefills if worker.running)
        await dying.kill()
        pair.release()
        answer = last(await generating, stream=False)
        assert answer["output_ids"] == pair.truth().output_ids
        first, second = (asked["bootstrap_room"] for asked in pair.asked(pair.decode))
        assert first != second
        assert pair.decode.log.at("/generate")[0].disconnected
        assert pair.router.app.router.metrics.retries == 1, "one loss, though both halves failed"
        await pair.free()


async def test_a_prefill_half_that_dies_within_its_answer_is_replaced(stage: Stage) -> None:
    async with halves(stage, prefills=2) as pair:
        for worker in pair.prefills:
            worker.faults.cut_body(path="/generate", after_bytes=20)
        reply = await pair.generate()
        assert (reply.status, reply.error_type) == (502, "upstream_unreachable")
        assert (await pair.generate()).status == 200
        await pair.free()


@pytest.mark.parametrize(("phase", "stream"), [("prefilling", False), ("prefilling", True), ("decoding", False)])
async def test_a_lost_decode_half_is_replaced_and_its_prompt_computed_anew(
    stage: Stage, phase: str, stream: bool
) -> None:
    async with halves(stage, decodes=2) as pair:
        pair.hold(pair.prefills if phase == "prefilling" else pair.decodes)
        generating = pair.generating(stream=stream)
        await (pair.prefilling() if phase == "prefilling" else pair.decoding())
        lost = next(worker for worker in pair.decodes if worker.running)
        other = next(worker for worker in pair.decodes if worker is not lost)
        await lost.kill()
        pair.release()
        answer = last(await generating, stream=stream)
        assert answer["output_ids"] == other.log.generations[-1].output_ids
        first, second = (asked["bootstrap_room"] for asked in pair.asked(pair.prefill))
        assert first != second
        assert pair.router.app.router.metrics.retries == 1
        await pair.free()


async def test_a_stream_that_had_begun_is_broken_off(stage: Stage) -> None:
    async with halves(stage) as pair:
        pair.hold(pair.decodes)
        client = await stage.client(pair.router)
        body = orjson.dumps({"input_ids": PROMPT, "sampling_params": SHORT, "stream": True})
        await client.send(request("POST", "/generate", JSON, body))
        await pair.decoding()
        await pair.decode.kill()
        with pytest.raises(Exception, match="cut after status 200"):
            await client.read()
        await until(lambda: not pair.router.pool.in_flight, "every lease is back")


async def test_where_nobody_is_left_the_loss_is_said(stage: Stage) -> None:
    async with halves(stage) as pair:
        await pair.prefill.kill()
        reply = await pair.generate()
        assert (reply.status, reply.error_type) == (502, "upstream_unreachable")
        assert pair.prefill.url in reply.json()["error"]["message"]
        await pair.free()


async def test_without_one_of_the_halves_it_is_503_by_name(stage: Stage) -> None:
    router = await stage.router()
    async with (
        HalfWorker(Pairing("prefill")) as prefill,
        HalfWorker(Pairing("decode")) as decode,
    ):
        pair = Halves(router, [prefill], [decode])
        for worker, missing in ((prefill, "decode"), (decode, "prefill")):
            await register(router, worker)
            reply = await pair.generate()
            assert (reply.status, reply.error_type) == (503, "no_worker_available")
            assert f"no routable {missing} worker: none is registered" in reply.json()["error"]["message"]
            assert (await router.ask("GET", "/readiness")).status == 503
            assert (await pair.post("/v1/tokenize", prompt="Hi")).status == 200
            await router.ask("POST", f"/remove_worker?url={worker.url}")
        await until(lambda: not router.leftovers(), "the probes are over")


async def test_a_quarantined_half_is_named(stage: Stage) -> None:
    async with halves(stage, health_check_failure_threshold=1, **PROBING) as pair:
        for worker, role in ((pair.prefill, "prefill"), (pair.decode, "decode")):
            await worker.kill()
            await becomes(pair.router, worker, WorkerState.QUARANTINED)
            reply = await pair.generate()
            assert reply.status == 503
            assert f"no routable {role} worker: 1 quarantined" in reply.json()["error"]["message"]
            await worker.restart()
            await becomes(pair.router, worker, WorkerState.READY)
            assert (await pair.generate()).status == 200


@pytest.mark.parametrize("half", ["prefill", "decode"])
@whole_and_streamed
async def test_what_one_half_refuses_is_the_answer_and_the_other_is_free(stage: Stage, half: str, stream: bool) -> None:
    async with halves(stage) as pair:
        refusing = pair.prefill if half == "prefill" else pair.decode
        refusing.faults.status(429, b'{"error":"too much"}', path="/generate")
        reply = await pair.generate(stream=stream)
        assert (reply.status, reply.body) == (429, b'{"error":"too much"}')
        await pair.free()


async def test_bad_input_is_refused_as_one_engine_would(stage: Stage) -> None:
    async with halves(stage) as pair:
        assert (await pair.generate(sampling_params={"temperature": -1})).status == 400
        reply = await pair.generate(sampling_params={"temperature": -1}, stream=True)
        assert b"temperature" in reply.body
        assert (await pair.router.ask("POST", "/generate", JSON, b"no json")).status == 400
        await pair.free()


async def test_halves_that_are_swapped_are_refused_and_nothing_looks_complete(stage: Stage) -> None:
    router = await stage.router()
    async with (
        HalfWorker(Pairing("prefill")) as prefill,
        HalfWorker(Pairing("decode")) as decode,
    ):
        await router.ask("POST", f"/add_worker?url={prefill.url}&worker_type=decode")
        await router.ask("POST", f"/add_worker?url={decode.url}&worker_type=prefill&bootstrap_port={prefill.port}")
        await until(lambda: not router.leftovers(), "the first probes are over")
        reply = await Halves(router, [prefill], [decode]).generate()
        assert (reply.status, reply.error_type) == (501, "unsupported_by_engine")
        assert "but reports that it is" in reply.json()["error"]["message"]


async def test_an_answer_of_more_than_one_token_is_no_prefill_halfs(stage: Stage) -> None:
    async with halves(stage) as pair:
        told = {
            "text": "",
            "output_ids": [1, 2],
            "meta_info": {"completion_tokens": 2, "finish_reason": {"type": "stop"}},
        }
        pair.prefill.faults.status(200, orjson.dumps(told), path="/generate")
        reply = await pair.generate()
        assert (reply.status, reply.error_type) == (502, "upstream_error")
        await pair.free()


@whole_and_streamed
async def test_what_is_sent_again_has_another_name_inward_and_its_own_outward(stage: Stage, stream: bool) -> None:
    """An engine may still have what was sent to it before, and aborts what bears the name of an ended stream."""
    async with halves(stage, prefills=2) as pair:
        pair.hold(pair.prefills)
        generating = pair.generating(rid='a "name"', stream=stream)
        await pair.prefilling()
        await next(worker for worker in pair.prefills if worker.running).kill()
        await until(lambda: len(pair.decode.log.at("/generate")) == 2 and pair.decode.running, "it was sent again")
        first, second = (exchange.json()["rid"] for exchange in pair.decode.log.at("/generate"))
        assert first == 'a "name"' != second
        for worker in pair.workers:
            worker.engine.abort_ended_streams()
        pair.release()
        answer = last(await generating, stream=stream)
        assert (answer["meta_info"]["id"], len(answer["output_ids"])) == ('a "name"', 6)


async def test_an_abort_finds_what_was_sent_again(stage: Stage) -> None:
    async with halves(stage, prefills=2) as pair:
        pair.hold(pair.prefills)
        generating = pair.generating(rid="r", input_ids=[PROMPT, PROMPT])
        await pair.prefilling(2)
        await next(worker for worker in pair.prefills if worker.running).kill()
        await until(lambda: len(pair.decode.log.at("/generate")) == 2, "it was sent again")
        await pair.prefilling(2)
        pair.release()
        pair.hold(pair.decodes)
        await pair.decoding()
        await control(pair, "/abort_request", rid="r_0")
        pair.release()
        answers = last(await generating, stream=False)
        assert [answer["meta_info"]["id"] for answer in answers] == ["r_0", "r_1"]
        assert [answer["meta_info"]["finish_reason"]["type"] for answer in answers] == ["abort", "length"]


# Clients


@whole_and_streamed
@pytest.mark.parametrize("phase", ["prefilling", "decoding"])
async def test_a_client_that_leaves_frees_both_engines(stage: Stage, phase: str, stream: bool) -> None:
    async with halves(stage) as pair:
        pair.hold(pair.prefills if phase == "prefilling" else pair.decodes)
        client = await stage.client(pair.router)
        body = orjson.dumps({"input_ids": PROMPT, "sampling_params": SHORT, "stream": stream})
        await client.send(request("POST", "/generate", JSON, body))
        await (pair.prefilling() if phase == "prefilling" else pair.decoding())
        client.abort()
        await pair.free()


async def test_as_many_pairs_as_there_may_be_connections_do_not_wait_for_each_other(stage: Stage) -> None:
    async with halves(stage, max_connections=2) as pair:
        many = [pair.generating() for _ in range(12)]
        assert [(await each).status for each in many] == [200] * 12


# Aborts


@whole_and_streamed
@pytest.mark.parametrize("phase", ["prefilling", "decoding"])
async def test_an_abort_reaches_both_halves(stage: Stage, phase: str, stream: bool) -> None:
    async with halves(stage) as pair:
        pair.hold(pair.prefills if phase == "prefilling" else pair.decodes)
        generating = pair.generating(rid="r", stream=stream)
        await (pair.prefilling() if phase == "prefilling" else pair.decoding())
        await control(pair, "/abort_request", rid="r")
        pair.release()
        if phase == "prefilling":
            assert all(worker.log.at("/abort_request") for worker in pair.workers)
        answer = last(await generating, stream=stream)
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert answer["output_ids"] == pair.truth().output_ids[: len(answer["output_ids"])]
        await pair.free()


@whole_and_streamed
@pytest.mark.parametrize("named", [True, False], ids=["with a rid", "without"])
@pytest.mark.parametrize("phase", ["prefilling", "decoding"])
async def test_a_group_that_is_aborted_frees_both_halves(stage: Stage, phase: str, named: bool, stream: bool) -> None:
    async with halves(stage) as pair:
        pair.hold(pair.prefills if phase == "prefilling" else pair.decodes)
        sampling = {"max_new_tokens": 1000, "ignore_eos": True}
        body = {"input_ids": PROMPT, "sampling_params": sampling, "stream": stream, **({"rid": "r"} if named else {})}
        group = [*JSON, ("X-Group-Id", "g")]
        asked = whole_or_cut(pair.router.ask("POST", "/generate", group, orjson.dumps(body)))
        async with under_way(asked) as generating:
            await (pair.prefilling() if phase == "prefilling" else pair.decoding())
            await control(pair, "/abort_request", group="g")
            if named and phase == "prefilling":
                assert all(worker.log.at("/abort_request") for worker in pair.workers)
            pair.release()
            reply = await generating
        if named:
            assert last(reply, stream=stream)["meta_info"]["finish_reason"]["type"] == "abort"
        await pair.free()
        assert all(len(each.output_ids) < 1000 for worker in pair.workers for each in worker.log.generations)


# Pauses and updates


@whole_and_streamed
@pytest.mark.parametrize("phase", ["prefilling", "decoding"])
@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_generations_outlive_an_update_in_each_mode(stage: Stage, mode: str, phase: str, stream: bool) -> None:
    async with halves(stage, worker=TELLING, partial_rollout="resume") as pair:
        pair.hold(pair.prefills if phase == "prefilling" else pair.decodes)
        generating = pair.generating(stream=stream, return_logprob=True, return_routed_experts=True)
        await (pair.prefilling() if phase == "prefilling" else pair.decoding())
        await control(pair, "/pause_generation", mode=mode)
        pair.release()
        await control(pair, "/update_weight_version", new_version="2", abort_all_requests=False)
        await control(pair, "/continue_generation")
        answer = last(await generating, stream=stream)
        meta, sampled = answer["meta_info"], [each.output_ids for each in pair.decode.log.generations]
        assert meta["finish_reason"]["type"] == "length"
        assert len(answer["output_ids"]) == len(meta["output_token_logprobs"]) == SHORT["max_new_tokens"]
        assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
        rows = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32).reshape(-1, 3, 2)
        assert np.array_equal(rows, route(MOE, [*PROMPT, *answer["output_ids"]]))
        first = "default" if phase == "decoding" else "2"
        assert meta["weight_versions"][0]["version"] == first
        assert meta["weight_versions"][-1]["version"] == "2" or sampled[0] == answer["output_ids"]
        ends = [(each["start"], each["end"]) for each in meta["weight_versions"]]
        assert ends[-1][1] == 6
        await pair.free()


async def test_a_retract_is_told_as_in_place_and_said(stage: Stage) -> None:
    async with halves(stage) as pair:
        said = (await control(pair, "/pause_generation", mode="retract")).json()
        assert (said["mode"], said["in_place_of"]) == ("in_place", "retract")
        assert pair.decode.engine.paused == "in_place"
        await control(pair, "/continue_generation")


@whole_and_streamed
async def test_without_resume_what_a_pause_cut_comes_aborted(stage: Stage, stream: bool) -> None:
    async with halves(stage) as pair:
        pair.hold(pair.prefills)
        generating = pair.generating(stream=stream)
        await pair.prefilling()
        await control(pair, "/pause_generation", mode="abort")
        pair.release()
        answer = last(await generating, stream=stream)
        assert (answer["meta_info"]["finish_reason"]["type"], answer["output_ids"]) == ("abort", [])
        await control(pair, "/continue_generation")
        await pair.free()


async def test_a_batch_of_which_some_were_cut_is_resumed_whole(stage: Stage) -> None:
    async with halves(stage, partial_rollout="resume") as pair:
        pair.hold(pair.workers)
        generating = pair.generating(input_ids=[PROMPT, PROMPT[:2], PROMPT[:3]])
        await pair.prefilling(3)
        await control(pair, "/pause_generation", mode="abort")
        pair.release()
        await control(pair, "/continue_generation")
        answers = last(await generating, stream=False)
        assert [len(answer["output_ids"]) for answer in answers] == [6, 6, 6]
        await pair.free()


async def test_no_half_of_a_generation_is_written_behind_an_answered_pause(stage: Stage) -> None:
    async with halves(stage) as pair:
        await control(pair, "/pause_generation", mode="in_place")
        generating = pair.generating()
        await until(lambda: pair.router.app.router.gate.held == 1, "it waits at the gate")
        assert not any(worker.log.at("/generate") for worker in pair.workers)
        await control(pair, "/continue_generation")
        assert last(await generating, stream=False)["output_ids"] == pair.truth().output_ids


async def test_the_first_token_has_the_version_of_the_half_that_sampled_it(stage: Stage) -> None:
    async with halves(stage, readmit="healthy") as pair:
        pair.prefill.engine.weight_version = "old"
        pair.decode.engine.weight_version = "new"
        await pair.answer()  # what a prefill half says of its weights is believed once it says it twice
        answer = await pair.answer()
        spans = [{"version": "old", "start": 0, "end": 1}, {"version": "new", "start": 1, "end": 6}]
        assert answer["meta_info"]["weight_versions"] == spans
        one = await pair.answer(sampling_params={"max_new_tokens": 1})
        assert one["meta_info"]["weight_versions"] == [{"version": "old", "start": 0, "end": 1}]
        assert one["meta_info"]["weight_version"] == "old"


async def test_a_stream_of_halves_that_stay_apart_is_refused_by_name(stage: Stage) -> None:
    async with halves(stage, readmit="healthy") as pair:
        pair.prefill.engine.weight_version = "old"
        pair.decode.engine.weight_version = "new"
        reply = await pair.generate(stream=True)
        assert (reply.status, reply.error_type) == (502, "upstream_error")
        assert "has weights new, its prefill worker old" in reply.json()["error"]["message"]
        await pair.free()


async def test_a_prompt_whose_weights_changed_meanwhile_is_computed_anew(stage: Stage) -> None:
    async with halves(stage) as pair:
        pair.hold(pair.prefills)
        generating = pair.generating()
        await pair.prefilling()
        await control(pair, "/update_weight_version", new_version="2", abort_all_requests=False)
        pair.release()
        answer = last(await generating, stream=False)
        assert answer["meta_info"]["weight_versions"] == [{"version": "2", "start": 0, "end": 6}]


async def test_rows_of_what_the_decode_half_retracted_are_refused(stage: Stage) -> None:
    async with halves(stage, worker=TELLING) as pair:
        pair.hold(pair.decodes)
        generating = pair.generating(return_routed_experts=True)
        await pair.decoding()
        pair.decode.engine.pause(PauseMode.RETRACT)
        pair.release()
        pair.decode.engine.resume()
        reply = await generating
        assert (reply.status, reply.error_type) == (502, "upstream_error")
        assert "retracted the generation, and lost its rows" in reply.json()["error"]["message"]


@whole_and_streamed
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["prefill first", "decode first"])
async def test_what_somebody_aborts_at_the_engines_comes_aborted(
    stage: Stage, stream: bool, order: tuple[int, int]
) -> None:
    async with halves(stage) as pair:
        pair.hold(pair.prefills)
        generating = pair.generating(stream=stream)
        await pair.prefilling()
        for place in order:
            pair.workers[place].engine.abort_all()
        pair.release()
        answer = last(await generating, stream=stream)
        assert (answer["meta_info"]["finish_reason"]["type"], answer["output_ids"]) == ("abort", [])
        await pair.free()
