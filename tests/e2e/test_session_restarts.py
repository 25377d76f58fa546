"""Sessions under `--state-dir`: what was answered is there again in a router that is started on the same directory."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest

from miles_router import cli
from miles_router.errors import StateFull
from miles_router.settings.config import MiddlewareSpec
from miles_router.slots import slot_of
from miles_router.testing import SimulatedWorker
from tests.support.experts_trial import EXPERTS, MOE, SHAPE, experts_of, truth
from tests.support.restarts import StateDirectories
from tests.support.session_trial import ADD, CHAT, SESSIONS, SessionTrial, message_of, qwen3, user
from tests.support.tokenizers import tokenizer_directory
from tests.support.waiting import until

MINE = "/session/finalize"


class Restarts(StateDirectories):
    """Of sessions."""

    @contextlib.asynccontextmanager
    async def started(self, **settings: Any) -> AsyncIterator[SessionTrial]:
        """The next router."""
        options, behind = settings.pop("options", {}), settings.pop("behind", ())
        layers, model = (MiddlewareSpec(SESSIONS, options), *behind), tokenizer_directory("qwen3")
        async with self.router(*layers, hf_checkpoint=model, **settings) as router:
            yield SessionTrial(router, [self.worker])


@pytest.fixture
async def restarts(tmp_path: Path) -> AsyncIterator[Restarts]:
    async with SimulatedWorker(tokenizer=qwen3(), weight_version="1") as worker:
        yield Restarts(worker, tmp_path)


async def everything(trial: SessionTrial, session: str) -> list[Any]:
    """All that a trainer can read of a session."""
    told = []
    forms: list[Any] = [{"format": "json"}, {"format": "safetensors"}, {"max_seq_len": 4000, "metadata": {}}]
    forms.append({"format": "json", "per_token": ["reward", "advantage"]})
    for form in (*forms, {"format": "json", "branches": "all", "build": "last_step"}):
        answer = await trial.ask("POST", f"/sessions/{session}/samples", form)
        told.append((answer.status, answer.body))
    read = await trial.read(session)
    read["metadata"].pop("last_used_at")
    return [*told, read]


async def test_newest_unnamed_sessions_are_listed_without_a_damaged_part(
    restarts: Restarts, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"s-{number}" for number in range(6)]
    async with restarts.started() as before:
        for name in names:
            await before.create(name)

    async def listed(trial: SessionTrial) -> list[str]:
        answer = await trial.ask("GET", "/router/episodes")
        assert answer.status == 200, answer.body
        return [row["id"] for row in answer.json()["episodes"]]

    async with restarts.started(options={"max_sessions": 4}) as after:
        assert await listed(after) == names[:1:-1]
        assert (await after.read("s-0"))["session_id"] == "s-0", "it is found all the same"
        assert await listed(after) == [*names[:1:-1], "s-0"]
    torn = restarts.directory / f"slot-{slot_of('s-3'):02d}.sqlite"
    torn.write_bytes(b"x" * 4096)
    async with restarts.started() as after:
        for _ in range(2):
            assert await listed(after) == [name for name in reversed(names) if slot_of(name) != slot_of("s-3")]
        assert [record.message for record in caplog.records].count("stored_sessions_not_listed") == 1


async def test_samples_after_a_kill_are_byte_for_byte_those_before(restarts: Restarts) -> None:
    async with restarts.started() as before:
        session = await before.create(metadata={"task": "7"}, contract={"budget": {"max_turns": 40}})
        messages = [user("Add 17 and 25.")]
        first = await before.chat(session, messages, tools=[ADD])
        messages += [message_of(first), user("And then?")]
        second = await before.stream(session, messages, tools=[ADD])
        assert second
        await before.chat(session, messages, tools=[ADD], n=3)
        await before.chat(session, [user("Add 17 and 26.")], tools=[ADD])
        await before.chat(session, [user("A side call")])
        for reward in (0.25, 0.5):
            given: Any = [{"turn": 1, "reward": reward}, {"turn": 1, "span": [1, 3], "name": "advantage", "value": 2.0}]
            set_now = await before.ask("POST", f"/sessions/{session}/rewards", [*given, {"segment": 0, "reward": 1}])
            assert (set_now.status, set_now.json()["rewards"]) == (200, 3)
        told = await everything(before, session)
        async with restarts.started() as after:
            assert [each["session_id"] for each in (await after.ask("GET", "/sessions")).json()["sessions"]] == [
                session
            ]
            assert await everything(after, session) == told
            assert told[0][0] == 200
            assert [each["value"] for each in told[-1]["records"][1]["rewards"]] == [0.5, 2.0]
            audit = await after.ask("POST", f"/sessions/{session}/audit", {})
            assert (audit.status, b"tools_not_held" in audit.body) == (200, False), "tools are there as they were sent"
            late = await after.ask("POST", f"/sessions/{session}/rewards", {"turn": 2, "reward": 0.75})
            assert (late.status, late.json()["rewards"]) == (200, 4)
            told = await everything(after, session)
            async with restarts.started() as again:
                assert await everything(again, session) == told


async def test_the_next_turn_goes_on_in_the_same_segment_with_the_same_tokens(restarts: Restarts) -> None:
    async with restarts.started() as before:
        session = await before.create()
        messages = [user("Hello there.")]
        messages += [message_of(await before.chat(session, messages)), user("Go on.")]
        async with restarts.started() as after:
            messages += [message_of(await after.chat(session, messages)), user("And on.")]
            await after.stream(session, messages)
            assert await after.reasons(session) == [None, None, None]
            (sample,) = await after.samples(session)
            last = restarts.worker.log.generations[-1]
            assert sample["tokens"][: len(last.input_ids)] == list(last.input_ids)
            async with restarts.started() as again:
                assert await again.samples(session) == [sample]


async def test_budget_key_and_end_of_an_episode_are_there_again(restarts: Restarts) -> None:
    async with restarts.started(api_key="ours") as before:
        contract = {"key": True, "budget": {"max_turns": 2}}
        made = await before.ask("POST", "/sessions", {"contract": contract}, [("Authorization", "Bearer ours")])
        session, key = made.json()["session_id"], [("Authorization", f"Bearer {made.json()['api_key']}")]
        assert (await before.turn(session, [user("One")], key)).status == 200
        async with restarts.started(api_key="ours") as after:
            assert (await after.turn(session, [user("Two")], key)).status == 200
            assert (await after.turn(session, [user("Three")], key)).status == 400
            async with restarts.started(api_key="ours") as again:
                read = await again.ask("GET", f"/sessions/{session}", None, [("Authorization", "Bearer ours")])
                assert read.json()["metadata"]["end_reason"] == "turns"
                assert len(read.json()["records"]) == 2


async def test_what_was_deleted_stays_deleted_and_its_name_is_free(restarts: Restarts) -> None:
    async with restarts.started() as before:
        await before.create("gone")
        await before.chat("gone", [user("Hi")])
        await before.create("stays")
        await before.ask("DELETE", "/sessions/gone")
        async with restarts.started() as after:
            assert (await after.ask("GET", "/sessions/gone")).status == 404
            assert (await after.ask("POST", "/sessions", {"session_id": "stays"})).status == 409
            await after.create("gone")
            assert (await after.read("gone"))["records"] == []


@pytest.mark.alone("it reads trajectories without naming a session")
async def test_finalized_sessions_that_headers_made_are_there_again(restarts: Restarts) -> None:
    named = [("X-Session-Id", "s-1"), ("X-Instance-Id", "i-1"), ("X-Turn-Id", "t-1")]
    async with restarts.started() as before:
        body = {"model": "m", "max_tokens": 8, "messages": [user("Hi")]}
        assert (await before.ask("POST", CHAT, body, named)).status == 200
        await before.ask("POST", MINE, {"session_id": "s-1", "reward": 0.5, "label": "good"})
        told = (await before.ask("POST", "/trajectory/read", {"instance_id": "i-1"})).json()["data"]
        async with restarts.started() as after:
            assert (await after.ask("POST", "/trajectory/read", {"instance_id": "i-1"})).json()["data"] == told
            assert (await after.ask("POST", CHAT, body, named)).status == 200  # repeated
            other = {**body, "messages": [user("More")]}
            assert (await after.ask("POST", CHAT, other, named)).error_type == "conflict"
            assert told[0]["reward"] == 0.5


async def test_stored_responses_can_be_read_and_gone_on_from(restarts: Restarts) -> None:
    async with restarts.started() as before:
        session = await before.create()
        path = f"/sessions/{session}/v1/responses"
        body = {"model": "m", "max_output_tokens": 8, "input": "Hello", "instructions": "Be brief."}
        stored = (await before.ask("POST", path, body)).json()
        dropped = (await before.ask("POST", path, {**body, "input": "Another"})).json()
        await before.ask("DELETE", f"{path}/{dropped['id']}")
        held = (await before.ask("GET", f"{path}/{stored['id']}")).body
        items = (await before.ask("GET", f"{path}/{stored['id']}/input_items")).body
        async with restarts.started() as after:
            assert (await after.ask("GET", f"{path}/{stored['id']}")).body == held
            assert (await after.ask("GET", f"{path}/{stored['id']}/input_items")).body == items
            assert (await after.ask("GET", f"{path}/{dropped['id']}")).status == 404
            goes_on = {**body, "input": "And?", "previous_response_id": stored["id"]}
            assert (await after.ask("POST", path, goes_on)).status == 200
            assert (await after.records(session))[-1]["parent"] == 0


@pytest.mark.parametrize(
    "deletion", [("DELETE", "/sessions/s-1?abort=true"), ("POST", "/session/discard")], ids=["abort", "discard"]
)
async def test_a_session_that_the_disk_cannot_delete_stays_as_it_is(
    restarts: Restarts, monkeypatch: pytest.MonkeyPatch, deletion: tuple[str, str]
) -> None:
    async with restarts.started() as before:
        body = {"model": "m", "max_tokens": 8, "messages": [user("Hi")]}
        assert (await before.ask("POST", CHAT, body, [("X-Session-Id", "s-1")])).status == 200
        known, store = (await before.records("s-1"), await before.samples("s-1")), before.router.app.router.store
        assert store is not None
        committed = store.commits
        with monkeypatch.context() as full:
            full.setattr(store, "delete", _full)
            refused = await before.ask(*deletion, {"session_id": "s-1"})
            assert (refused.status, refused.error_type) == (507, "state_failed")
        assert (await before.records("s-1"), await before.samples("s-1")) == known
        await until(lambda: store.commits == committed + 1, "it is held again, whatever became of it")
        async with restarts.started() as after:
            assert (await after.records("s-1"), await after.samples("s-1")) == known
            assert (await after.ask(*deletion, {"session_id": "s-1"})).status in (200, 204)
            async with restarts.started() as again:
                assert (await again.ask("GET", "/sessions/s-1")).status == 404


async def _full(*args: Any, **named: Any) -> None:
    raise StateFull("no room is left on the disk")


KEEPER = MiddlewareSpec(EXPERTS, {"moe_shape": SHAPE})


@pytest.mark.parametrize("held", [True, False])
async def test_rows_of_experts_are_there_again_or_missing_by_name(tmp_path: Path, held: bool) -> None:
    async with SimulatedWorker(tokenizer=qwen3(), weight_version="1", moe=MOE) as worker:
        restarts = Restarts(worker, tmp_path)
        async with restarts.started(behind=(KEEPER,), state_rows=held) as before:
            session = await before.create()
            messages = [user("Hello there.")]
            messages += [message_of(await before.chat(session, messages)), user("Go on.")]
            messages += [message_of(await before.chat(session, messages)), user("And on.")]
            await before.chat(session, messages, n=2)
            told, asked = await before.samples(session), {"session_id": session, "leaf": 2}
            rows = (await before.ask("POST", "/routed_experts", asked)).body
            assert np.array_equal(experts_of(told[0]), truth(told[0]["tokens"]))
            async with restarts.started(behind=(KEEPER,), state_rows=held) as after:
                delivered = await after.ask("POST", "/routed_experts", asked)
                samples = await after.samples(session)
                if held:
                    assert delivered.body == rows
                    assert samples == told
                    assert await after.read(session) == {
                        **(whole := await before.read(session)),
                        "metadata": {**whole["metadata"], "last_used_at": ANY},
                    }
                else:
                    assert delivered.error_type == "not_found"
                    assert "--state-rows was off" in str(samples[0]["metadata"]["routed_experts_missing"])
                    assert [each["tokens"] for each in samples] == [each["tokens"] for each in told]
                await after.chat(session, messages)
                last = (await after.samples(session))[-1]
                assert np.array_equal(experts_of(last), truth(last["tokens"])), "what goes on has all of them"


async def test_the_command_lists_what_is_held_and_writes_a_session(
    restarts: Restarts, capsys: pytest.CaptureFixture[str]
) -> None:
    async with restarts.started() as before:
        session = await before.create("written")
        await before.chat(session, [user("Hi")])
        (sample,) = await before.samples(session)
        records = await before.records(session)
        directory = str(restarts.directory)
        with pytest.raises(SystemExit):
            await asyncio.to_thread(cli.main, ["state", directory])
        assert "another running router has it open" in capsys.readouterr().err
    await asyncio.to_thread(cli.main, ["state", directory])
    listed = [line.split()[1:4] for line in capsys.readouterr().out.splitlines()]
    assert ["written", "session", "2"] in listed
    await asyncio.to_thread(cli.main, ["state", directory, "written"])
    about, record, leaf = map(json.loads, capsys.readouterr().out.splitlines())
    assert about["session"]["session_id"] == "written"
    assert record["record"] == records[0]
    assert leaf["leaf"]["tokens"] == sample["tokens"]
    assert leaf["leaf"]["loss_mask"] == sample["loss_mask"]
    with pytest.raises(SystemExit):
        await asyncio.to_thread(cli.main, ["state", directory, "nobody"])
    assert "holds nothing of 'nobody'" in capsys.readouterr().err


async def test_held_sessions_expire_though_nobody_loads_them(restarts: Restarts) -> None:
    async with restarts.started() as before:
        await before.create("forgotten")
        async with restarts.started(options={"idle_timeout": 0.5}) as after:
            statistics = after.router.app.router.statistics["openai_sessions"]
            await until(lambda: statistics()["expired"] == 1, "it expires")
            assert (await after.ask("GET", "/sessions")).json() == {"sessions": []}
