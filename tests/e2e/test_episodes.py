"""Sessions and text rollouts as episodes at `/router/episodes`: each field is what records and samples say; pages stay
in order while sessions come and go; what nobody knows is refused by name; with text off, no text, id or byte leaves."""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import numpy as np
import pytest

from middleware_hub.view.command import token_bytes
from miles_router.middlewares import ASGIApp, Receive, Router, Scope, Send
from miles_router.middlewares.episodes import (
    EpisodeLine,
    EpisodePlace,
    EpisodeRow,
    EpisodeShelf,
    EpisodeView,
    Facets,
    TokenCounts,
    TurnRow,
)
from miles_router.settings.config import DASHBOARD, MiddlewareSpec, RouterConfig
from miles_router.testing import SimulatedWorker
from miles_router.trajectory import Piece, Trajectory
from miles_router.trajectory.safetensors import unpack
from tests.support.cache_trial import CACHE, Trial, checkpoint, simulated_trial
from tests.support.experts_trial import simulated_experts
from tests.support.http import RawReply
from tests.support.session_trial import (
    SESSIONS,
    Message,
    SessionTrial,
    message_of,
    qwen3,
    simulated_sessions,
    user,
)
from tests.support.stage import Stage, staged
from tests.support.tokenizers import tokenizer_directory
from tests.support.under_way import under_way
from tests.support.waiting import until

SYSTEM: Message = {"role": "system", "content": "Be brief."}
HI = [SYSTEM, user("Hi")]
BINARY = [("Accept", "application/octet-stream")]
ROW = {
    *("id", "kind", "state", "group", "label", "model", "turns", "under_way", "segments", "leaves", "reasons"),
    *("tokens", "finish_reason", "end_reason", "weight_versions", "workers", "started_at", "last_used_at", "waited_s"),
}
TURN = {
    *("turn", "parent", "reason", "edit", "side_call", "choice", "prompt_tokens", "given_tokens", "dropped_tokens"),
    *("start", "end", "spans", "finish_reason", "cached_tokens", "worker", "rid", "request_id", "turn_id", "asked_at"),
    *("first_token_at", "answered_at", "waited_s", "rewards", "parsed"),
}


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[SessionTrial]:
    async with staged() as stage, simulated_sessions(stage, token_latency_s=0.0) as made:
        yield made


@pytest.fixture
async def trial(shared: SessionTrial) -> SessionTrial:
    for session in shared.router.app.layers[0].store:  # type: ignore[attr-defined]
        shared.router.app.layers[0].store.delete(session)  # type: ignore[attr-defined]
    shared.worker.log.clear()
    return shared


async def got(trial: Any, path: str, **query: Any) -> Any:
    """A good answer."""
    answer = await asked(trial, path, **query)
    assert answer.status == 200, answer.body
    return answer.json()


async def asked(trial: Any, path: str, **query: Any) -> RawReply:
    answer: RawReply = await trial.router.ask("GET", f"/router/{path}{'?' if query else ''}{urlencode(query)}")
    return answer


async def row_of(trial: Any, session: str) -> Any:
    rows = (await got(trial, "episodes", limit=500))["episodes"]
    return next(row for row in rows if row["id"] == session)


async def branched(trial: SessionTrial, **made: Any) -> str:
    """A session with an edited history, a retry and a compaction: leaves 2, 3, 4, 5."""
    session = await trial.create(**made)
    history = [*HI]
    for turn in range(3):
        history += [message_of(await trial.chat(session, history)), user(f"Go on {turn}")]
    history = history[:-1]
    await trial.chat(session, [*history[:-2], user("Something else")])
    await trial.chat(session, [*history[:-2], user("Something else")])
    await trial.chat(session, [SYSTEM, user("So far: much was said.")])
    return session


# The list


async def test_a_row_is_what_the_records_and_samples_of_its_session_say(trial: SessionTrial) -> None:
    session = await branched(trial, metadata={"label": "sums", "group": "g-1"})
    read, row, samples = await trial.read(session), await row_of(trial, session), await trial.samples(session)
    records, about = read["records"], read["metadata"]
    assert set(row) == ROW
    assert (row["kind"], row["state"], row["group"], row["label"], row["model"]) == (
        *("session", "idle", "g-1", "sums", "m"),
    )
    assert (row["turns"], row["under_way"], row["segments"], row["leaves"]) == (
        *(len(records), 0, len(about["roots"]), len(about["leaves"])),
    )
    reasons = [record["reason"] for record in records if record["reason"] is not None]
    assert row["reasons"] == {reason: reasons.count(reason) for reason in reasons}
    assert {"retry", "compaction"} <= row["reasons"].keys()
    sampled = sum(record["completion_tokens"] for record in records)
    assert row["tokens"] == {
        "all": sum(record["given_tokens"] + record["completion_tokens"] for record in records),
        "sampled": sampled,
        "trained": sum(sum(sample["loss_mask"]) for sample in samples),
    }
    assert (row["finish_reason"], row["end_reason"]) == (records[-1]["finish_reason"], None)
    assert (row["weight_versions"], row["workers"]) == (["1"], [trial.worker.url])
    assert (row["started_at"], row["last_used_at"]) == (about["created_at"], about["last_used_at"])
    assert row["waited_s"] == 0.0


async def test_trained_are_the_tokens_that_the_operators_own_defaults_train(stage: Stage) -> None:
    options = {"default_branches": "drop-superseded", "default_side_calls": False}
    async with simulated_sessions(stage, options=options) as trial:
        session = await branched(trial)
        row, samples = await row_of(trial, session), await trial.samples(session)
        trained = sum(sum(sample["loss_mask"]) for sample in samples)
        assert 0 < trained < row["tokens"]["sampled"]
        assert row["tokens"]["trained"] == trained
    async with simulated_sessions(stage, options={"default_mask": ("last_turn",)}) as trial:
        assert (await row_of(trial, await branched(trial)))["tokens"]["trained"] is None


async def test_a_session_that_runs_waits_and_ends_says_so(stage: Stage) -> None:
    async with simulated_sessions(stage, token_latency_s=0.002) as trial:
        session = await trial.create(contract={"group": 7})
        assert (await row_of(trial, session))["state"] == "idle"
        assert (await trial.ask("POST", "/pause_generation", {"mode": "retract"})).status == 200
        async with under_way(trial.turn(session, HI, ignore_eos=True, max_tokens=30_000)):
            await until(lambda: trial.router.app.router.gate.held == 1, "it waits")
            row = await row_of(trial, session)
            assert (row["state"], row["under_way"], row["group"]) == ("waiting", 1, "7")
            assert [each["id"] for each in (await got(trial, "episodes", state="waiting"))["episodes"]] == [session]
            assert (await trial.ask("POST", "/continue_generation", {})).status == 200
            await until(lambda: trial.worker.running, "it runs")
            assert (await row_of(trial, session))["state"] == "running"
            assert (await trial.ask("POST", "/abort_request", {"group": "7"})).status == 200
            await until(lambda: not trial.worker.running, "it has ended")
        await stage.nothing_under_way()
        row = await row_of(trial, session)
        assert (row["state"], row["end_reason"], row["turns"]) == ("ended", "aborted", 1)
        (record,) = await trial.records(session)
        assert row["waited_s"] == record["waited_s"] > 0
        (turn,) = (await got(trial, f"episodes/{session}"))["turns"]
        assert turn["waited_s"] == record["waited_s"]


async def test_filters_leave_what_all_of_them_leave(trial: SessionTrial) -> None:
    forked, other = await branched(trial, metadata={"group": "a"}), await trial.create(metadata={"group": "b"})
    await trial.chat(other, HI)
    worker = next(iter(trial.router.pool))

    async def ids(**query: Any) -> set[str]:
        return {row["id"] for row in (await got(trial, "episodes", **query))["episodes"]}

    assert await ids() == {forked, other}
    assert await ids(group="a") == await ids(reason="compaction") == await ids(group="a", reason="retry") == {forked}
    assert await ids(group="b", reason="retry") == await ids(reason="other") == await ids(group="c") == set()
    assert await ids(state="idle") == await ids(kind="session") == {forked, other}
    assert await ids(worker=worker.address.id) == await ids(worker=worker.url) == {forked, other}
    assert await ids(worker="http://10.9.8.7:1") == set()  # which may have had some, and left


REFUSED: list[tuple[dict[str, str], str]] = [
    ({"limit": "0"}, "limit must be a whole number from 1 to 500, got '0'"),
    ({"limit": "501"}, "limit must be a whole number from 1 to 500"),
    ({"limit": "٣"}, "limit must be a whole number"),
    ({"after": "nothing"}, "after must be the `next` value of an earlier page, got 'nothing'"),
    ({"after": "nan~s"}, "after must be the `next` value of an earlier page"),
    ({"state": "done"}, "state must be one of running, waiting, idle, ended, got 'done'"),
    ({"kind": "rollout"}, "kind must be one of session, got 'rollout'"),
    ({"reason": "fork"}, "reason must be one of batch, changed_tools, choice"),
    ({"worker": "ftp://x"}, "must start with http:// or https://"),
    ({"sort": "age"}, "unknown parameter 'sort'; known are limit, after, state"),
]
UNKNOWN: list[tuple[str, dict[str, str], str]] = [
    ("episodes", {"worker": "0123456789ab"}, "no worker '0123456789ab' is registered"),
    ("episodes/nobody", {}, "no episode 'nobody' is held"),
    ("episodes/nobody/tokens", {}, "no episode 'nobody' is held"),
]


async def test_what_a_list_does_not_know_is_refused_by_name(trial: SessionTrial) -> None:
    for status, cases in ((400, [("episodes", *each) for each in REFUSED]), (404, UNKNOWN)):
        for path, query, words in cases:
            answer = await asked(trial, path, **query)
            assert (answer.status, words in answer.json()["error"]["message"]) == (status, True), (path, query)


async def test_pages_have_each_episode_once_while_others_come_and_go(trial: SessionTrial) -> None:
    made = [await trial.create(f"episode-{number}") for number in range(60)]
    gone = set(made[::7])
    seen: list[str] = []
    cursor: str | None = None
    for page in range(20):
        answer = await got(trial, "episodes", limit=5, **({} if cursor is None else {"after": cursor}))
        seen += [row["id"] for row in answer["episodes"]]
        cursor = answer["next"]
        if cursor is None:
            break
        assert len(answer["episodes"]) == 5
        await trial.create(f"later-{page}")
        for session in made[len(made) - 1 - page :: -9]:  # behind and before the place of the cursor, and at it
            if session in gone:
                await trial.ask("DELETE", f"/sessions/{session}")
    assert cursor is None
    kept = [session for session in reversed(made) if session not in gone]
    assert [session for session in seen if session in kept] == kept
    assert len(seen) == len(set(seen))
    assert not any(session.startswith("later") for session in seen)


async def test_of_ten_thousand_episodes_a_page_costs_a_page_and_a_filter_goes_in_steps(
    trial: SessionTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = trial.router.app.layers[0].store  # type: ignore[attr-defined]
    for number in range(10_000):
        store.create(f"many-{number}", {"group": number % 10})
    looked_at: list[int] = []
    newest = store.shelf.newest

    def counted(*asked: Any) -> Any:
        found = newest(*asked)
        looked_at.append(len(found))
        return found

    monkeypatch.setattr(store.shelf, "newest", counted)
    page = await got(trial, "episodes", limit=50)
    assert (len(page["episodes"]), sum(looked_at)) == (50, 51)
    behind = await got(trial, "episodes", limit=50, after=page["next"])
    assert (len(behind["episodes"]), sum(looked_at)) == (50, 102)
    few = await got(trial, "episodes", group="3", limit=500)
    assert [row["id"] for row in few["episodes"]] == [f"many-{number}" for number in range(9_993, 4_993, -10)]
    assert few["next"] is not None
    monkeypatch.setattr("miles_router.tasks.HOLD", 0.0)  # each step lets others go on
    turns = itertools.count()

    async def go_on() -> None:
        while True:
            next(turns)
            await asyncio.sleep(0)

    async with under_way(go_on()):
        none = await got(trial, "episodes", group="nobody")
    assert (none["episodes"], none["next"]) == ([], None)
    assert next(turns) > 10_000


# One episode


async def test_the_detail_has_the_turns_the_tree_and_why_each_segment_begins(trial: SessionTrial) -> None:
    session = await branched(trial, metadata={"task": 7})
    row, detail, read = await row_of(trial, session), await got(trial, f"episodes/{session}"), await trial.read(session)
    assert {**{name: detail[name] for name in ROW}, "turns": detail["turns_total"]} == row
    assert (detail["metadata"], detail["contract"], detail["untraced"]) == ({"task": 7}, None, 0)
    assert (detail["leaf_turns"], detail["next_turn"], detail["text"]) == (read["metadata"]["leaves"], None, True)
    same = [
        *("turn", "parent", "reason", "edit", "choice", "prompt_tokens", "given_tokens", "dropped_tokens"),
        *("finish_reason", "cached_tokens", "worker", "rid", "request_id", "turn_id", "asked_at", "answered_at"),
        "rewards",
    ]
    for turn, record in zip(detail["turns"], read["records"], strict=True):
        assert set(turn) == TURN
        assert {name: turn[name] for name in same} == {name: record[name] for name in same}
        assert [turn["start"], turn["end"]] == record["span"]
        assert turn["spans"] == [{**run, "worker": record["worker"]} for run in record["weight_versions"]]
    (compaction,) = [turn for turn in detail["turns"] if turn["reason"] == "compaction"]
    assert (compaction["edit"]["held"], compaction["edit"]["sent"]) == ("Hi", "So far: much was said.")
    tree = detail["tree"]
    assert [line["samples"] for line in tree if line["samples"]] == [[2], [3], [4], [5]]
    assert sum(line["turns"] for line in tree) == 6
    assert {line["reason"] for line in tree} == {None, *(turn["reason"] for turn in detail["turns"])}
    assert sum(line["tokens"] for line in tree) == row["tokens"]["sampled"]


# Its tokens


async def test_the_tokens_of_each_leaf_are_those_of_its_sample_in_both_forms(trial: SessionTrial) -> None:
    session = await branched(trial)
    samples = await trial.samples(session)
    spell = token_bytes(trial.router.app.router.tokenizer)
    for sample in samples:
        leaf = sample["metadata"]["leaf"]
        told = await got(trial, f"episodes/{session}/tokens", leaf=leaf)
        for name in ("tokens", "loss_mask", "logprobs", "response_length"):
            assert told[name] == sample[name], name
        sampled = np.zeros(len(sample["tokens"]), dtype=np.uint8)
        for turn in sample["metadata"]["turns"]:
            sampled[turn["start"] : turn["end"]] = 1
        assert told["sampled"] == sampled.tolist()
        assert told["versions"] == sample["weight_versions"]
        assert told["turns"] == sample["metadata"]["turns"]
        assert (told["id"], told["leaf"], told["start"], told["stop"], told["length"], told["text"]) == (
            *(session, leaf, 0, len(sample["tokens"]), len(sample["tokens"]), True),
        )
        assert told["spelling"] == {str(token): (spell(token) or b"").hex() for token in sorted({*sample["tokens"]})}
        assert told["expert_entropy"] is None
        reply = await trial.router.ask("GET", f"/router/episodes/{session}/tokens?leaf={leaf}", BINARY)
        assert reply.value("content-type") == b"application/octet-stream"
        arrays, metadata = unpack(reply.body)
        names = ("tokens", "loss_mask", "sampled", "logprobs")
        assert {name: arrays[name].tolist() for name in names} == {
            **{name: told[name] for name in names[:3]},
            "logprobs": np.array(told["logprobs"], np.float32).tolist(),
        }
        ends = [0, *arrays["ends"].tolist()]
        spelled = [bytes(arrays["bytes"][a:b]).hex() for a, b in itertools.pairwise(ends)]
        assert dict(zip(map(str, arrays["ids"].tolist()), spelled, strict=True)) == told["spelling"]
        facts = json.loads(metadata["facts"])
        assert facts == {name: told[name] for name in facts}
    last = await got(trial, f"episodes/{session}/tokens")
    assert last["leaf"] == samples[-1]["metadata"]["leaf"]


async def test_a_slice_has_its_positions_and_no_more(trial: SessionTrial, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await branched(trial)
    whole = await got(trial, f"episodes/{session}/tokens", leaf=2)
    part = await got(trial, f"episodes/{session}/tokens", leaf=2, start=5, stop=9)
    for name in ("tokens", "loss_mask", "sampled", "logprobs"):
        assert part[name] == whole[name][5:9]
    assert (part["turns"], part["versions"], part["length"]) == (whole["turns"], whole["versions"], whole["length"])
    nothing = await got(trial, f"episodes/{session}/tokens", leaf=2, start=whole["length"])
    assert (nothing["tokens"], nothing["spelling"]) == ([], {})
    monkeypatch.setattr("middleware_hub.dashboard.episodes.MOST_TOKENS", 7)
    bounded = await got(trial, f"episodes/{session}/tokens", leaf=2, start=1)
    assert (bounded["stop"], len(bounded["tokens"])) == (8, 7)
    for query, words in (
        ({"start": 0, "stop": 8}, "stop - start may be 7 at most, not 8"),
        ({"start": whole["length"] + 1}, f"start must be a whole number from 0 to {whole['length']}"),
        ({"start": 3, "stop": 2}, "stop must be a whole number from 3"),
        ({"leaf": 6}, "leaf must be the number of a turn; the session has 6"),
        ({"leaf": "last"}, "leaf must be a whole number from 0"),
    ):
        answer = await asked(trial, f"episodes/{session}/tokens", **{"leaf": 2, **query})
        assert (answer.status, words in answer.json()["error"]["message"]) == (400, True), answer.body


# Who may see what


async def test_with_text_off_no_text_id_or_byte_leaves(stage: Stage) -> None:
    secret = secrets.token_hex(8)
    async with simulated_sessions(stage, settings={"dashboard_text": "off"}) as trial:
        sampling = {"stop": [secret], "logit_bias": {"4711": -1}}
        session = await trial.create(
            metadata={"label": secret, "note": secret, "group": "g"}, contract={"sampling": sampling}
        )
        first = message_of(await trial.chat(session, [SYSTEM, user(secret)]))
        await trial.chat(session, [SYSTEM, user(f"{secret} edited"), first, user("And?")])
        tokens = f"/router/episodes/{session}/tokens"
        replies = [
            await asked(trial, "episodes"),
            await asked(trial, f"episodes/{session}"),
            await trial.router.ask("GET", tokens),
            await trial.router.ask("GET", tokens, BINARY),
        ]
        assert [reply.status for reply in replies] == [200] * 4
        assert not [reply.body for reply in replies if secret.encode() in reply.body]
        listed, detail, told = (reply.json() for reply in replies[:3])
        (row,) = listed["episodes"]
        assert (listed["text"], row["label"], row["group"]) == (False, None, "g")
        assert (detail["text"], detail["metadata"], detail["label"]) == (False, None, None)
        assert (detail["contract"], b"4711" in replies[1].body) == (None, False)
        edits = [turn["edit"] for turn in detail["turns"] if turn["edit"] is not None]
        assert [(edit["message"], edit["held"], edit["sent"]) for edit in edits] == [(1, None, None)]
        assert (told["text"], told["tokens"], told["spelling"], told["about"]) == (False, None, None, None)
        assert len(told["loss_mask"]) == len(told["logprobs"]) == told["length"]
        arrays, metadata = unpack(replies[3].body)
        assert {*arrays} == {"loss_mask", "sampled", "logprobs"}
        assert json.loads(metadata["facts"])["text"] is False
        (config,) = [(await got(trial, "info"))["config"]["dashboard_text"]]
        assert config == "off"


async def test_a_router_without_the_dashboard_has_neither_page_nor_routes(stage: Stage) -> None:
    listed = (MiddlewareSpec(DASHBOARD),)
    assert RouterConfig(middlewares=listed).chain == RouterConfig(middlewares=listed, dashboard=False).chain == listed
    router = await stage.router(await stage.worker(), dashboard=False, admin_api_key="admin")
    assert (await router.ask("GET", "/router/info", [("Authorization", "Bearer admin")])).json()["middlewares"] == []
    for path in ("/dashboard", "/dashboard/own/main.js", "/router/episodes", "/router/run"):
        assert (await router.ask("GET", path)).status == 401


async def test_a_session_that_is_held_and_not_in_memory_is_found(stage: Stage, tmp_path: Any) -> None:
    async with simulated_sessions(stage, settings={"state_dir": str(tmp_path)}) as trial:
        session = await branched(trial, session="kept")
        before = await got(trial, f"episodes/{quote(session)}")
        store = trial.router.app.layers[0].store  # type: ignore[attr-defined]
        held = store.find(session)
        store.when_deleted = lambda session_id: None
        store.delete(held)  # from memory alone
        assert [row["id"] for row in (await got(trial, "episodes"))["episodes"]] == ["kept"]
        after = await got(trial, f"episodes/{quote(session)}")
        assert {**after, "last_used_at": 0} == {**before, "last_used_at": 0}


#: Why, as a layer of somebody's own may put it.
WORDS = "in words that a prompt has"
SPAN = {"start": 1, "end": 2, "version": "1", "worker": None, "aside": WORDS}


@dataclass(frozen=True, kw_only=True)
class NotedRow(EpisodeRow):
    aside: str = WORDS


class Jotter:
    """A layer of somebody's own, which holds one episode of two tokens."""

    reasons = ("whim",)

    def __init__(self, app: ASGIApp, *, router: Router) -> None:
        self.app = app
        self.shelf = EpisodeShelf[EpisodeView]()
        self.shelf.add((7.5, "note-1"), Note())
        router.episodes["note"] = self
        router.run.record({"1": 1}, given=1, reused=0, reason=WORDS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)

    async def newest(self, before: EpisodePlace | None, most: int) -> Sequence[EpisodeView]:
        return self.shelf.newest(before, most)

    async def find(self, episode_id: str) -> EpisodeView | None:
        return next((each for each in self.shelf.newest(None, 1) if each.place[1] == episode_id), None)


class Note:
    place: EpisodePlace = (7.5, "note-1")

    def facets(self) -> Facets:
        return Facets("idle", "g", ["whim", WORDS], [])

    def row(self) -> EpisodeRow:
        nothing: dict[str, Any] = dict.fromkeys(("label", "model", "finish_reason", "end_reason"))
        count: dict[str, Any] = {"turns": 1, "under_way": 0, "segments": 1, "leaves": 1}
        count["reasons"] = {"whim": 1, "other": 1, WORDS: 2}
        times: dict[str, Any] = {"started_at": 7.5, "last_used_at": 8.0, "waited_s": 0.0}
        tokens = TokenCounts(2, 1, 1)
        lists: dict[str, Any] = {"weight_versions": [], "workers": []}
        return NotedRow(id="note-1", state="idle", group="g", tokens=tokens, **nothing, **count, **times, **lists)

    def about(self) -> dict[str, Any]:
        return {"metadata": {"on": "paper"}, "contract": None, "untraced": 0, "aside": WORDS}

    def turns(self) -> list[TurnRow]:
        given: dict[str, Any] = {"prompt_tokens": 1, "given_tokens": 1, "dropped_tokens": 0, "start": 1, "end": 2}
        edit = {"message": 0, "field": "content", "held": WORDS, "sent": None, "aside": WORDS}
        return [TurnRow(turn=0, parent=None, reason=WORDS, edit=edit, spans=[SPAN], finish_reason="stop", **given)]

    def line(self, leaf: int | None) -> EpisodeLine:
        trajectory = Trajectory([Piece.given([5]), Piece.sampled([6], [-0.5], "1")])
        turns = [{"turn": 0, "start": 1, "end": 2, "reason": WORDS, "aside": WORDS}]
        return EpisodeLine(
            leaf=0,
            trajectory=trajectory,
            loss_mask=lambda: trajectory.loss_mask,
            turns=turns,
            response_length=1,
            status="completed",
        )


@pytest.mark.alone("its layer has the same note in each process")
async def test_a_layer_of_ones_own_has_episodes_in_the_same_list(stage: Stage) -> None:
    jotter = MiddlewareSpec("tests.e2e.test_episodes.Jotter")
    async with SimulatedWorker(tokenizer=qwen3()) as worker:
        layers = (jotter, MiddlewareSpec(SESSIONS))
        router = await stage.router(worker.url, middlewares=layers, hf_checkpoint=tokenizer_directory("qwen3"))
        trial = SessionTrial(router, [worker])
        session = await trial.create()
        rows = (await got(trial, "episodes"))["episodes"]
        assert [(row["kind"], row["id"]) for row in rows] == [("session", session), ("note", "note-1")]
        (note,) = (await got(trial, "episodes", reason="whim", kind="note", group="g"))["episodes"]
        assert note == rows[1]
        assert (await got(trial, "episodes", reason="other"))["episodes"] == [note], "reasons in words"
        assert set(note) == {*ROW, "aside"}
        detail = await got(trial, "episodes/note-1")
        assert (detail["metadata"], detail["turns"][0]["reason"], detail["tree"][0]["samples"]) == (
            *({"on": "paper"}, WORDS, [0]),
        )
        told = await got(trial, "episodes/note-1/tokens")
        assert (told["tokens"], told["sampled"], told["logprobs"]) == ([5, 6], [0, 1], [0.0, -0.5])
    router = await stage.router(middlewares=(jotter,), dashboard_text="off")
    for path in ("episodes", "episodes/note-1", "episodes/note-1/tokens", "run"):
        told = await router.ask("GET", f"/router/{path}")
        assert (told.status, WORDS.encode() in told.body) == (200, False), "reasons in words are texts"


# Texts


@pytest.fixture
async def texts(stage: Stage) -> AsyncIterator[Trial]:
    async with simulated_trial(stage) as made:
        yield made


async def the_rows(texts: Any, **query: Any) -> list[Any]:
    """All of them, newest first."""
    return list((await got(texts, "episodes", **query))["episodes"])


async def three_turns(texts: Trial) -> tuple[str, list[Any]]:
    """A rollout whose text goes on twice behind an answer: its last text, and the answers."""
    text, answers = "one", []
    for _ in range(3):
        answers.append(await texts.generate(text=text))
        text += f"{answers[-1]['text']} and"
    return text.removesuffix(" and"), answers


async def test_a_rollout_is_one_episode_whose_turns_are_its_generations(texts: Trial) -> None:
    text, answers = await three_turns(texts)
    found = await texts.retrieve(text=text)
    (row,) = await the_rows(texts)
    assert set(row) == ROW
    assert (row["kind"], row["state"], row["turns"], row["segments"], row["leaves"]) == ("text", "idle", 3, 1, 1)
    assert (row["reasons"], row["finish_reason"], row["end_reason"]) == ({}, "length", None)
    assert row["tokens"] == {
        "all": len(found["tokens"]),
        "sampled": sum(found["loss_mask"]),
        "trained": sum(found["loss_mask"]),
    }
    assert texts.worker is not None
    assert (row["weight_versions"], row["workers"]) == (["default"], [texts.worker.url])
    assert (row["group"], row["label"], row["model"], row["waited_s"]) == (None, None, None, 0.0)
    detail = await got(texts, f"episodes/{row['id']}")
    assert {**{name: detail[name] for name in ROW}, "turns": detail["turns_total"]} == row
    assert (detail["metadata"], detail["contract"], detail["leaf_turns"]) == (None, None, [2])
    turns = detail["turns"]
    assert all(set(turn) == TURN for turn in turns)
    assert [(turn["turn"], turn["parent"], turn["reason"]) for turn in turns] == [
        (0, None, None),
        (1, 0, None),
        (2, 1, None),
    ]
    assert [turn["rid"] for turn in turns] == [answer["meta_info"]["id"] for answer in answers]
    assert [turn["cached_tokens"] for turn in turns] == [answer["meta_info"]["cached_tokens"] for answer in answers]
    assert [turn["prompt_tokens"] for turn in turns] == [answer["meta_info"]["prompt_tokens"] for answer in answers]
    given = [exchange.generation for exchange in texts.log]
    assert [turn["end"] for turn in turns] == [len(each.input_ids) + len(each.output_ids) for each in given]
    assert all(row["started_at"] <= turn["asked_at"] <= turn["answered_at"] for turn in turns)
    spans = [span for turn in turns for span in turn["spans"]]
    assert [{name: span[name] for name in ("version", "start", "end")} for span in spans] == found["weight_versions"]
    assert {span["worker"] for span in spans} == {texts.worker.url}


async def test_its_tokens_are_those_that_are_retrieved(texts: Trial) -> None:
    text, _ = await three_turns(texts)
    found = await texts.retrieve(text=text)
    (row,) = await the_rows(texts)
    told = await got(texts, f"episodes/{row['id']}/tokens")
    for name, other in (
        ("tokens", "tokens"),
        ("loss_mask", "loss_mask"),
        ("sampled", "loss_mask"),
        ("logprobs", "rollout_logp"),
    ):
        assert told[name] == found[other], name
    assert told["versions"] == found["weight_versions"]
    assert (told["leaf"], told["length"], told["spelling"] is None) == (2, len(found["tokens"]), False)
    runs = [(run["start"], run["end"]) for run in found["weight_versions"]]
    assert [(turn["start"], turn["end"]) for turn in told["turns"]] == runs
    part = await got(texts, f"episodes/{row['id']}/tokens", start=2, stop=5)
    assert part["tokens"] == found["tokens"][2:5]


async def test_a_rollout_under_way_runs_and_one_that_is_not_answered_is_none(stage: Stage) -> None:
    async with simulated_trial(stage, token_latency_s=0.002) as texts:
        assert texts.worker is not None
        endless = {"text": "one", "sampling_params": {"max_new_tokens": 30_000, "ignore_eos": True}}
        async with under_way(texts.post("/generate", endless)):
            await until(lambda: texts.worker is not None and texts.worker.running, "it runs")
            (row,) = await the_rows(texts, state="running")
            assert (row["turns"], row["under_way"], row["leaves"], row["tokens"]["all"]) == (0, 1, 0, 0)
            refused = await asked(texts, f"episodes/{row['id']}/tokens")
            assert (refused.status, "leaf must be" in refused.json()["error"]["message"]) == (400, True)
        await until(lambda: texts.worker is not None and not texts.worker.running, "its client has left")
        await stage.nothing_under_way()
        assert await the_rows(texts) == []


async def another(stage: Stage, texts: Trial, options: dict[str, Any] | None = None, **settings: Any) -> Trial:
    """A router of other settings before the same worker."""
    assert texts.worker is not None
    layers = (MiddlewareSpec(CACHE, options or {}),)
    router = await stage.router(texts.worker.url, middlewares=layers, hf_checkpoint=checkpoint(), **settings)
    return Trial(router, texts.worker)


async def test_with_text_off_its_ids_stay(stage: Stage, texts: Trial) -> None:
    hidden = await another(stage, texts, dashboard_text="off")
    await hidden.generate(text="one")
    (row,) = await the_rows(hidden)
    told = await got(hidden, f"episodes/{row['id']}/tokens")
    assert (told["text"], told["tokens"], told["spelling"]) == (False, None, None)
    assert len(told["loss_mask"]) == told["length"] > 0


async def test_both_kinds_are_one_list_newest_first(stage: Stage) -> None:
    async with simulated_experts(stage, around=(SESSIONS, CACHE)) as texts:
        made: list[str] = []
        for number in range(3):
            made.append(await texts.create(f"session-{number}"))
            await texts.generate(text=f"text {number}")
        rows = await the_rows(texts)
        assert [row["kind"] for row in rows] == ["text", "session"] * 3
        assert [row["id"] for row in rows if row["kind"] == "session"] == made[::-1]
        first = await got(texts, "episodes", limit=3)
        second = await got(texts, "episodes", limit=3, after=first["next"])
        assert (first["episodes"] + second["episodes"], second["next"]) == (rows, None)
        assert [row["kind"] for row in await the_rows(texts, kind="text")] == ["text"] * 3
        text = next(row for row in rows if row["kind"] == "text")
        told = await got(texts, f"episodes/{text['id']}/tokens")
        assert len(told["expert_entropy"]) == told["length"] - 1
