"""Sessions and texts of a router of several processes: each has one owner, every process finds it, and none comes back
empty."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from miles_router.fleet.placement.sessions import Affinity
from miles_router.settings.config import MiddlewareSpec
from miles_router.testing import SimulatedWorker
from miles_router.trajectory.retrieved import read_safetensors_list
from tests.e2e.test_retrieve_from_text import siblings
from tests.support.cache_trial import CACHE, Trial, checkpoint
from tests.support.experts_trial import EXPERTS, MOE, SHAPE, ExpertsTrial, tokens_of, truth
from tests.support.http import Client, RawReply, ask
from tests.support.owned import name_of, names_of, several
from tests.support.running_router import running_router
from tests.support.scripted_chat import able, chat_reply
from tests.support.scripted_worker import script
from tests.support.session_trial import (
    CHAT,
    JSON,
    SESSIONS,
    SessionTrial,
    exactly,
    message_of,
    qwen3,
    user,
)
from tests.support.shard_owners import owners_at
from tests.support.stage import Stage
from tests.support.tokenizers import tokenizer_directory
from tests.support.waiting import until

LAYER = (MiddlewareSpec(SESSIONS, {}),)
HI = [user("Hi")]
GOOD = script(chat_reply([7, 8], "Hello"))


async def small(stage: Stage, directory: Path, count: int = 2) -> list[SessionTrial]:
    """Routers before a scripted worker that answers every turn with `Hello`."""
    worker = able(await stage.worker()).always(GOOD)
    routers = await several(stage, directory, count, worker, middlewares=LAYER, hf_checkpoint=checkpoint())
    return [SessionTrial(router, ()) for router in routers]


def holding(trials: list[SessionTrial]) -> list[int]:
    """How many sessions each holds."""
    return [trial.statistics()["sessions"] for trial in trials]


async def test_turns_of_a_session_are_exact_wherever_they_land(stage: Stage, tmp_path: Path) -> None:
    async with SimulatedWorker(tokenizer=qwen3(), weight_version="1") as worker:
        checked: Any = {"middlewares": LAYER, "hf_checkpoint": tokenizer_directory("qwen3")}
        routers = await several(stage, tmp_path, 3, worker.url, **checked)
        trials = [SessionTrial(router, [worker]) for router in routers]
        kept = [await stage.client(router) for router in routers]
        for number in range(3):
            session = await trials[number].create()
            before, messages = len(worker.log.at(CHAT)), [user(f"Count to {number}.")]
            for turn in range(6):
                body = {"model": "m", "max_tokens": 8, "messages": messages, "stream": False}
                target, data = f"/sessions/{session}{CHAT}", json.dumps(body).encode()
                place = (turn + number) % 3
                ask = kept[place].ask if turn % 2 else routers[place].ask
                reply = await ask("POST", target, JSON, data)
                assert reply.status == 200, reply.body
                messages = [*messages, message_of(reply.json()), user(f"And {turn}?")]
            (sample,) = await trials[(number + 1) % 3].samples(session)
            exactly(sample, *(each.generations[0] for each in worker.log.at(CHAT)[before:]))
        assert sum(holding(trials)) == 3


async def test_rewards_are_set_and_read_wherever_they_land(stage: Stage, tmp_path: Path) -> None:
    trials = await small(stage, tmp_path)
    for name in (name_of(0, 2), name_of(1, 2)):
        await trials[0].create(name)
        await trials[1].chat(name, HI)
        for trial, reward in zip(trials, (0.25, 0.5), strict=True):
            put = await trial.ask("POST", f"/sessions/{name}/rewards", [{"turn": 0, "reward": reward}])
            assert (put.status, put.json()) == (200, {"session_id": name, "rewards": 1})
            unknown = await trial.ask("POST", f"/sessions/{name}/rewards", {"turn": 1, "reward": 1.0})
            assert (unknown.status, unknown.error_type) == (404, "not_found")
            for other in trials:
                (sample,) = await other.samples(name, per_token=["reward"])
                assert (sample["per_token"]["reward"][-1], sum(sample["per_token"]["reward"])) == (reward, reward)
    assert holding(trials) == [1, 1]


async def test_a_session_that_headers_name_has_one_owner_too(stage: Stage, tmp_path: Path) -> None:
    trials = await small(stage, tmp_path)
    name = name_of(1, 2)
    body = {"model": "m", "messages": HI}
    for trial in trials:
        for headers in ([("X-Session-Id", name)], [("X-SMG-Routing-Key", name), ("X-Instance-Id", "i")]):
            assert (await trial.ask("POST", CHAT, body, headers)).status == 200
    assert holding(trials) == [0, 1]
    assert len(await trials[0].records(name)) == 4
    finalized = await trials[0].ask("POST", "/session/finalize", {"session_id": name})
    assert (finalized.status, finalized.json()["num_steps"]) == (200, 4)
    drained = await trials[0].ask("POST", "/trajectory/read", {"session_id": name, "drain": True})
    assert drained.json()["success"]
    assert holding(trials) == [0, 0]


async def test_a_client_that_names_no_host_is_told_where_it_has_connected(stage: Stage, tmp_path: Path) -> None:
    trials = await small(stage, tmp_path)
    body = json.dumps({"session_id": name_of(1, 2)}).encode()
    async with await Client.connect(trials[0].router.url) as client:
        await client.send(b"POST /sessions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        made = (await client.read("POST")).json()
    assert made["base_url"].startswith(f"{trials[0].router.url}/sessions/")


async def test_an_audit_of_a_session_that_nobody_has_is_404_everywhere(stage: Stage, tmp_path: Path) -> None:
    for trial in await small(stage, tmp_path):
        for index in range(2):
            gone = await trial.ask("POST", f"/episodes/{name_of(index, 2)}/audit", {})
            assert (gone.status, gone.error_type) == (404, "not_found")


async def test_every_process_lists_and_counts_the_sessions_of_all(stage: Stage, tmp_path: Path) -> None:
    trials = await small(stage, tmp_path, 3)
    names = [await trials[place % 3].create() for place in range(7)]
    for name in names[:5]:
        await trials[0].chat(name, HI)
        finalized = {"session_id": name, "instance_id": f"group {names.index(name) % 2}"}
        assert (await trials[0].ask("POST", "/session/finalize", finalized)).status == 200
    for trial in trials:
        listed = (await trial.ask("GET", "/sessions")).json()["sessions"]
        assert sorted(each["session_id"] for each in listed) == sorted(names)
        counts = (await trial.ask("GET", "/trajectory/stats")).json()
        assert counts["bytes"] > 0
        assert {**counts, "bytes": 0} == {"trajectories": 5, "groups": 2, "active_sessions": 2, "bytes": 0}
    batch = await trials[0].ask("POST", "/trajectory/read", {"instance_id": "group 0"})
    assert batch.error_type == "invalid_request", "a part of them would look like all"


# What is lost with a process


async def restarted(stage: Stage, directory: Path, index: int, urls: list[str]) -> SessionTrial:
    worker = able(await stage.worker()).always(GOOD)
    owners = owners_at(index, 2, directory, urls, Affinity())
    router = await stage.router(worker, owners=owners, middlewares=LAYER, hf_checkpoint=checkpoint())
    urls[index] = router.url
    return SessionTrial(router, ())


def refused(reply: RawReply) -> tuple[int, str]:
    return reply.status, reply.error_type


async def test_a_session_that_was_lost_is_410_and_never_a_new_one(stage: Stage, tmp_path: Path) -> None:
    urls = ["", ""]
    first = await restarted(stage, tmp_path, 0, urls)
    worker = able(await stage.worker()).always(GOOD)
    held, deleted, by_header, new = itertools.islice(names_of(1, 2), 4)
    turn = {"model": "m", "messages": HI}
    async with running_router(
        worker,
        owners=owners_at(1, 2, tmp_path, urls, Affinity()),
        middlewares=LAYER,
        hf_checkpoint=checkpoint(),
    ) as ends:
        urls[1] = ends.url
        second = SessionTrial(ends, ())
        await first.create(held)
        await first.create(deleted)
        assert (await first.ask("DELETE", f"/sessions/{deleted}")).status == 204
        by_path = await first.turn(held, HI)
        assert by_path.status == 200
        assert (await first.ask("POST", CHAT, turn, [("X-Session-Id", by_header)])).status == 200
        assert holding([second]) == [2]
    again = await restarted(stage, tmp_path, 1, urls)
    await until(lambda: not first.router.leftovers(), "nothing is under way")
    for trial in (first, again):
        assert refused(await trial.ask("GET", f"/sessions/{held}")) == (410, "not_found")
        assert refused(await trial.turn(held, HI)) == (410, "not_found")
        assert refused(await trial.ask("POST", f"/sessions/{held}/samples", {})) == (410, "not_found")
        assert refused(await trial.ask("POST", CHAT, turn, [("X-Session-Id", by_header)])) == (410, "not_found")
        assert refused(await trial.ask("GET", f"/sessions/{deleted}")) == (404, "not_found")
    assert holding([again]) == [0]
    for session in (deleted, new):
        assert (await first.ask("POST", CHAT, turn, [("X-Session-Id", session)])).status == 200
    # Whoever knows that it was lost may use its name again.
    assert refused(await first.ask("DELETE", f"/sessions/{held}")) == (410, "not_found")
    assert refused(await first.ask("DELETE", f"/sessions/{held}")) == (404, "not_found")
    assert await first.create(by_header) == by_header
    assert (await first.ask("POST", CHAT, turn, [("X-Session-Id", by_header)])).status == 200


TEXTS = (MiddlewareSpec(CACHE, {}),)
SYSTEM = "You are a careful solver. " * 40


@asynccontextmanager
async def trials_of(stage: Stage, directory: Path, count: int) -> AsyncIterator[list[Trial]]:
    async with SimulatedWorker(tokenizer=checkpoint()) as worker:
        routers = await several(stage, directory, count, worker.url, middlewares=TEXTS, hf_checkpoint=checkpoint())
        yield [Trial(router, worker) for router in routers]


def held(trials: list[Trial]) -> list[int]:
    """How many generations each holds."""
    return [trial.statistics()["entries"] for trial in trials]


async def test_a_text_that_goes_on_finds_its_ids_wherever_it_lands(stage: Stage, tmp_path: Path) -> None:
    async with trials_of(stage, tmp_path, 3) as trials:
        for prompt in range(4):
            text, before = SYSTEM + f"Question {prompt}: ", list[int]()
            for turn in range(4):
                trial = trials[(prompt + turn) % 3]
                answer = await trial.generate(text=text)
                (given,) = trial.given()
                assert given[: len(before)] == before, "the ids of the turn before, sampled ones included"
                before = [*given, *answer["output_ids"]]
                text += answer["text"]
                for each in trials:
                    found = await each.retrieve(text=text)
                    assert (found["tokens"], found["matched_tokens"]) == (before, len(before))
                text += f" And then {turn}?"
        assert held(trials) == [8, 4, 4], "where each was new"


async def test_ids_go_on_from_texts_and_texts_from_ids(stage: Stage, tmp_path: Path) -> None:
    async with trials_of(stage, tmp_path, 3) as trials:
        first = await trials[0].generate(text=SYSTEM + "a")
        ids = [*trials[0].given()[0], *first["output_ids"]]
        second = await trials[1].generate(input_ids=ids)
        text = SYSTEM + "a" + first["text"] + second["text"]
        found = await trials[2].retrieve(text=text)
        assert found["tokens"] == ids + second["output_ids"]
        assert held(trials) == [2, 0, 0]


async def test_spellings_of_one_text_in_several_processes_are_ambiguous_everywhere(
    stage: Stage, tmp_path: Path
) -> None:
    async with trials_of(stage, tmp_path, 3) as trials:
        text, rids = await siblings(*trials[:2])
        assert held(trials) == [1, 1, 0]
        for trial in trials:
            found = await trial.retrieve(text=text)
            assert (found["ambiguous"], sorted(found["candidates"])) == (True, sorted(rids))
            assert found["rid"] in rids
            assert found["tokens"] == (await trial.retrieve(rid=found["rid"]))["tokens"]
            listed, other = await trial.retrieve(texts=[text, "This is"])
            assert (sorted(listed["candidates"]), listed["rid"] in rids) == (sorted(rids), True)
            assert not other["ambiguous"]
            for rid in rids:
                assert not (await trial.retrieve(rid=rid))["ambiguous"], "an id selects exactly one"


async def test_many_texts_and_ids_are_gathered_from_all_processes(stage: Stage, tmp_path: Path) -> None:
    async with trials_of(stage, tmp_path, 3) as trials:
        texts, rids, ids = [], [], []
        for prompt in range(6):
            text = f"Question {prompt} {'x' * prompt}: "
            answer = await trials[prompt % 3].generate(text=text)
            ids.append([*trials[0].given()[0], *answer["output_ids"]])
            texts.append(text + answer["text"])
            rids.append(answer["meta_info"]["id"])
        assert sorted(held(trials)) == [2, 2, 2]
        for trial in trials:
            found = await trial.retrieve(texts=[*texts, "never seen"], return_logp=True)
            assert [each["tokens"] for each in found[:6]] == ids
            assert [each["matched_tokens"] for each in found[:6]] == list(map(len, ids))
            assert found[6]["matched_tokens"] == 0
            body = json.dumps({"texts": texts}).encode()
            binary = [*JSON, ("Accept", "application/octet-stream")]
            answer = await ask(trial.router.url, "POST", "/retrieve_from_text", binary, body)
            assert [list(each.tokens) for each in read_safetensors_list(answer.body)] == ids
            for rid, tokens in zip(rids, ids, strict=True):
                assert (await trial.retrieve(rid=rid))["tokens"] == tokens
            assert (await trial.post("/retrieve_from_text", {"rid": "nobody's"})).status == 404
            strict = {"texts": [texts[0], texts[1] + "?"], "strict": True}
            assert (await trial.post("/retrieve_from_text", strict)).error_type == "not_found"


async def test_rows_are_delivered_from_whichever_process_holds_them(stage: Stage, tmp_path: Path) -> None:
    async with SimulatedWorker(tokenizer=checkpoint(), moe=MOE) as worker:
        layers = (MiddlewareSpec(CACHE, {}), MiddlewareSpec(EXPERTS, {"moe_shape": SHAPE}))
        routers = await several(stage, tmp_path, 3, worker.url, middlewares=layers, hf_checkpoint=checkpoint())
        trials = [ExpertsTrial(router, [worker]) for router in routers]
        for prompt in range(3):
            answer = await trials[prompt].generate(text=f"Question {prompt}: ")
            (generation,) = trials[0].generations("/generate")[prompt:]
            wanted = truth(tokens_of(generation))
            for trial in trials:
                for asked in ({"rid": generation.rid}, {"text": f"Question {prompt}: {answer['text']}"}):
                    assert np.array_equal(await trial.rows(**asked), wanted)
        await trials[0].generate(text="Another: ", rid="gap", return_routed_experts=True, routed_experts_start_len=4)
        for trial in trials:
            assert (await trial.refused(rid="nobody's"))[:2] == (404, "not_found")
            status, _, message = await trial.refused(rid="gap")
            assert (status, "0 to 3" in message) == (404, True), "each says what the one that knows it says"
