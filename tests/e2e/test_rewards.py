"""Rewards, advantages and labels of turns, segments and token spans: set while and after an episode runs, and carried
into records, samples of every form and per-token arrays; or refused by name, with nothing changed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from middleware_hub.openai_session.sessions.rewards import MAX_AT_ONCE, MAX_ENTRIES, MAX_VALUE_BYTES
from miles_router.client import ErrorReply, NotFound, RouterClient
from miles_router.trajectory.sample import READERS
from tests.compat.miles_client import decode
from tests.support.session_apis import BOTH, PLAIN, Api, case
from tests.support.session_trial import Message, SessionTrial, message_of, simulated_sessions, user
from tests.support.stage import Stage, staged
from tests.support.under_way import under_way
from tests.support.waiting import until

BOTH_ARRAYS = ["reward", "advantage"]


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[SessionTrial]:
    async with staged() as stage, simulated_sessions(stage) as made:
        yield made


@pytest.fixture
def trial(shared: SessionTrial) -> SessionTrial:
    return shared


async def episode(trial: SessionTrial, turns: int = 3) -> str:
    """A session of one segment, each turn of 8 sampled tokens."""
    session = await trial.create()
    history: list[Message] = [user("Hi")]
    for turn in range(turns):
        answer = await trial.chat(session, history, ignore_eos=True)
        history += [message_of(answer), user(f"Go on {turn}")]
    return session


async def put(trial: SessionTrial, session: str, *rewards: Any) -> None:
    answer = await trial.ask("POST", f"/sessions/{session}/rewards", [*rewards])
    assert answer.status == 200, answer.body


def array(sample: Any, places: Mapping[tuple[int, int], float]) -> list[float]:
    """Return an array of a sample that has values at ranges of positions, later ones in place of earlier ones."""
    values = [0.0] * len(sample["tokens"])
    for (start, end), value in places.items():
        values[start:end] = [value] * (end - start)
    return values


def spans(sample: Any) -> list[tuple[int, int]]:
    return [(turn["start"], turn["end"]) for turn in sample["metadata"]["turns"]]


# Where values stand


async def test_rewards_reach_records_and_every_form_of_samples_in_each_api(trial: SessionTrial) -> None:
    for api in PLAIN:
        for stream in BOTH:
            with case(api, stream):
                await check_api(trial, api, stream=stream)


async def check_api(trial: SessionTrial, api: Api, *, stream: bool) -> None:
    session = await trial.create()
    for text in ("Hi", "Another question"):
        items: Any = [user(text)] if api in PLAIN[:1] or api.path == "/v1/messages" else text
        await api.turn(trial, session, items, 8, stream=stream)
    given = [
        {"turn": 0, "name": "reward", "value": 0.5},
        {"turn": 0, "name": "advantage", "value": -0.25},
        {"turn": 0, "span": [1, 2], "name": "advantage", "value": 2.0},
        {"segment": 1, "name": "reward", "value": 1.0},
        {"segment": 1, "name": "verdict", "value": {"solved": True, "by": "ü"}},
    ]
    await put(trial, session, {"turn": 0, "reward": 0.5}, *given[1:])
    expected = [given[:3], given[3:]]
    for form in ("full", "compact"):
        records = (await trial.ask("GET", f"/sessions/{session}?form={form}")).json()["records"]
        assert [record["rewards"] for record in records] == expected
    samples = await trial.samples(session, per_token=BOTH_ARRAYS)
    assert [sample["metadata"]["turns"][0]["rewards"] for sample in samples] == expected
    (first,), (second,) = map(spans, samples)
    start, end = first
    assert samples[0]["per_token"] == {
        "reward": array(samples[0], {(end - 1, end): 0.5}),
        "advantage": array(samples[0], {first: -0.25, (start + 1, start + 2): 2.0}),
    }
    at = second[1] - 1
    assert samples[1]["per_token"] == {
        "reward": array(samples[1], {(at, at + 1): 1.0}),
        "advantage": array(samples[1], {}),
    }
    packed = await trial.ask(
        "POST", f"/sessions/{session}/samples", {"format": "safetensors", "per_token": BOTH_ARRAYS}
    )
    for sample, read in zip(samples, READERS["safetensors"](packed.body), strict=True):
        assert {name: values.tolist() for name, values in read.per_token.items()} == sample["per_token"]
        assert read.to_dict()["per_token"] == sample["per_token"]
    ours = {"format": "miles", "per_token": BOTH_ARRAYS, "branches": "all", "max_seq_len": 4000}
    answer = await trial.ask("POST", f"/sessions/{session}/samples", ours)
    for sample, theirs in zip(samples, decode(answer.body).samples, strict=True):
        assert theirs.metadata["router"]["per_token"] == sample["per_token"]
        assert theirs.metadata["router"]["turns"][0]["rewards"] == sample["metadata"]["turns"][0]["rewards"]


async def test_narrower_places_and_later_values_count(trial: SessionTrial) -> None:
    session = await episode(trial)
    await put(trial, session, {"turn": 1, "span": [2, 9 - 1], "name": "advantage", "value": 3})
    await put(trial, session, {"turn": 1, "span": [4, 6], "name": "advantage", "value": 4.0})
    await put(trial, session, {"turn": 1, "name": "advantage", "value": 2.0}, {"turn": 2, "reward": 0.25})
    await put(trial, session, {"segment": 0, "name": "advantage", "value": 1.0}, {"segment": 0, "reward": 1.0})
    await put(trial, session, {"turn": 2, "span": [0, 2], "reward": -0.5}, {"turn": 0, "name": "x_reward", "value": 1})
    (sample,) = await trial.samples(session, per_token=[*BOTH_ARRAYS, "x_reward", "unheard_of"])
    one, two, three = spans(sample)
    at = two[0]
    assert sample["per_token"] == {
        "advantage": array(sample, {one: 1.0, two: 2.0, three: 1.0, (at + 2, at + 8): 3.0, (at + 4, at + 6): 4.0}),
        "reward": array(sample, {(three[0], three[0] + 2): -0.5, (three[1] - 1, three[1]): 1.25}),
        "x_reward": array(sample, {(one[1] - 1, one[1]): 1.0}),
        "unheard_of": array(sample, {}),
    }
    await put(trial, session, {"turn": 1, "span": [2, 8], "name": "advantage", "value": 5.0}, {"turn": 2, "reward": 0})
    (sample,) = await trial.samples(session, per_token=BOTH_ARRAYS)
    assert sample["per_token"] == {
        "advantage": array(sample, {one: 1.0, two: 2.0, three: 1.0, (at + 2, at + 8): 5.0}),
        "reward": array(sample, {(three[0], three[0] + 2): -0.5, (three[1] - 1, three[1]): 1.0}),
    }, "what was replaced is gone, and the later span covers the earlier one"
    rewards = (await trial.records(session))[2]["rewards"]
    assert [each["value"] for each in rewards] == [-0.5, 0]


async def test_a_cut_sample_has_the_reward_at_its_last_token_of_the_turn(trial: SessionTrial) -> None:
    session = await episode(trial)
    (sample,) = await trial.samples(session)
    start = spans(sample)[1][0]
    await put(trial, session, {"turn": 1, "reward": 0.5}, {"turn": 2, "reward": 7.0})
    await put(trial, session, {"turn": 1, "span": [2, 8], "name": "advantage", "value": 2.0})
    (cut,) = await trial.samples(session, max_seq_len=start + 5, per_token=BOTH_ARRAYS)
    assert cut["per_token"] == {
        "reward": array(cut, {(start + 4, start + 5): 0.5}),
        "advantage": array(cut, {(start + 2, start + 5): 2.0}),
    }
    (last,) = await trial.samples(session, build="last_step", per_token=["reward"])
    ends = [end - 1 for _, end in spans(sample)[1:]]
    assert np.flatnonzero(last["per_token"]["reward"]).tolist() == ends


async def test_a_reward_is_set_while_a_turn_runs_and_after_the_end(stage: Stage) -> None:
    async with simulated_sessions(stage, token_latency_s=0.01) as trial:
        session = await episode(trial, 1)
        running = trial.turn(session, [user("Go")], max_tokens=4000, ignore_eos=True)
        async with under_way(running):
            await until(lambda: len(trial.log) == 2, "the engine has a turn")
            await put(trial, session, {"turn": 0, "reward": 1.0})
            early = await trial.ask("POST", f"/sessions/{session}/rewards", {"turn": 1, "reward": 1.0})
            assert (early.status, early.error_type) == (404, "not_found"), "its turn is not recorded yet"
            assert (await trial.read(session))["metadata"]["in_flight"] == 1
        assert (await trial.ask("POST", "/session/finalize", {"session_id": session, "reward": 1.0})).status == 200
        await put(trial, session, {"turn": 0, "name": "advantage", "value": 0.125})
        (sample,) = await trial.samples(session)
        assert [each["value"] for each in sample["metadata"]["turns"][0]["rewards"]] == [1.0, 0.125]
        assert (await trial.ask("DELETE", f"/sessions/{session}")).status == 204
        gone = await trial.ask("POST", f"/sessions/{session}/rewards", {"turn": 0, "reward": 1.0})
        assert (gone.status, gone.error_type) == (404, "not_found")


# What is refused

GOOD: Any = {"turn": 0, "reward": 9.0}
#: Bodies, with the status and a part of the message.
REFUSED: Sequence[tuple[Any, int, str]] = [
    ({"turn": 2, "reward": 1.0}, 404, "there is no turn 2; the session has 2 turns"),
    ({"turn": -1, "reward": 1.0}, 404, "there is no turn -1"),
    ({"turn": True, "reward": 1.0}, 400, "turn must be the number of a turn"),
    ({"segment": 1, "reward": 1.0}, 404, "turn 1 begins no segment"),
    ({"segment": 0, "span": [0, 1], "reward": 1.0}, 400, "a span is one of a turn"),
    ({"turn": 0, "segment": 0, "reward": 1.0}, 400, "name one of turn and segment"),
    ({"reward": 1.0}, 400, "name one of turn and segment"),
    ({"turn": 0}, 400, "give either reward, or name and value"),
    ({"turn": 0, "reward": 1.0, "name": "x", "value": 1.0}, 400, "give either reward, or name and value"),
    ({"turn": 0, "name": "x"}, 400, "give either reward, or name and value"),
    ({"turn": 0, "value": 1.0}, 400, "give either reward, or name and value"),
    ({"turn": 0, "span": [2, 9], "reward": 1.0}, 400, "turn 0 sampled 8 tokens"),
    ({"turn": 0, "span": [-1, 2], "reward": 1.0}, 400, "turn 0 sampled 8 tokens"),
    ({"turn": 0, "span": [3, 3], "reward": 1.0}, 400, "turn 0 sampled 8 tokens"),
    ({"turn": 0, "span": [0.0, 2], "reward": 1.0}, 400, "span must be [start, end]"),
    ({"turn": 0, "span": 3, "reward": 1.0}, 400, "span must be [start, end]"),
    ({"turn": 0, "reward": "high"}, 400, "reward must be a number"),
    ({"turn": 0, "reward": True}, 400, "reward must be a number"),
    ({"turn": 0, "reward": None}, 400, "reward must be a number"),
    ({"turn": 0, "name": "advantage", "value": [1.0]}, 400, "advantage must be a number"),
    ({"turn": 0, "name": "a b", "value": 1.0}, 400, "name must be 1 to 64 of the characters"),
    ({"turn": 0, "name": 7, "value": 1.0}, 400, "name must be 1 to 64 of the characters"),
    ({"turn": 0, "rewards": 1.0}, 400, "unknown field 'rewards'"),
    ({"turn": 0, "name": "x", "value": "x" * MAX_VALUE_BYTES}, 400, f"a value may have {MAX_VALUE_BYTES} bytes"),
    (b'{"turn": 0, "reward": NaN}', 400, "reward is nan"),
    (b'{"turn": 0, "name": "x", "value": [1e999]}', 400, "value[0] is inf"),
    (b"7", 400, "a reward must be an object"),
    (b"", 400, "not valid JSON"),
    ([GOOD, {"turn": 7, "reward": 1.0}], 404, "[1]: there is no turn 7"),
    ([GOOD, 7], 400, "[1]: a reward must be an object"),
    ([GOOD] * (MAX_AT_ONCE + 1), 400, f"one request may set {MAX_AT_ONCE} rewards"),
]


async def test_what_is_refused_is_named_and_changes_nothing(trial: SessionTrial) -> None:
    session = await episode(trial, 2)
    await put(trial, session, {"turn": 0, "reward": 0.5})
    before = await trial.records(session), (await trial.read(session))["metadata"]["bytes"]
    for body, status, message in REFUSED:
        with case(str(body)[:80]):
            answer = await trial.ask("POST", f"/sessions/{session}/rewards", body)
            assert (answer.status, message in answer.json()["error"]["message"]) == (status, True), answer.body
            assert (await trial.records(session), (await trial.read(session))["metadata"]["bytes"]) == before
    nobody = await trial.ask("POST", "/sessions/nobody/rewards", GOOD)
    assert (nobody.status, nobody.error_type) == (404, "not_found")
    assert (await trial.ask("GET", f"/sessions/{session}/rewards")).status == 405


async def test_arrays_of_what_is_no_number_or_no_name_are_refused(trial: SessionTrial) -> None:
    session = await episode(trial, 1)
    await put(trial, session, {"turn": 0, "name": "verdict", "value": "good"})
    for wanted, message in (
        (["verdict"], "per_token 'verdict': the value of turn 0 is not a number"),
        (["reward", "reward"], "per_token has a name twice"),
        ("reward", "per_token must be a list"),
        ([f"n{number}" for number in range(17)], "per_token must be a list of at most 16 names"),
        (["a b"], "name must be 1 to 64"),
    ):
        answer = await trial.ask("POST", f"/sessions/{session}/samples", {"per_token": wanted})
        assert (answer.status, message in answer.json()["error"]["message"]) == (400, True), answer.body
    await put(trial, session, *({"turn": 0, "span": [0, end], "reward": 1.7e308} for end in (1, 2)))
    answer = await trial.ask("POST", f"/sessions/{session}/samples", {"per_token": ["reward"]})
    assert (answer.status, answer.error_type) == (422, "invalid_sample")
    assert "per_token.reward has a number that is not finite" in answer.json()["error"]["message"]


async def test_a_session_has_so_many_rewards_and_their_bytes_count(trial: SessionTrial) -> None:
    session = await episode(trial, 1)
    before = (await trial.read(session))["metadata"]["bytes"]
    for start in range(0, MAX_ENTRIES, MAX_AT_ONCE):
        await put(trial, session, *[{"turn": 0, "reward": start}] * MAX_AT_ONCE)
    more = await trial.ask("POST", f"/sessions/{session}/rewards", {"turn": 0, "reward": 0.0})
    assert (more.status, more.error_type) == (400, "invalid_request")
    assert f"a session may have {MAX_ENTRIES} rewards of turns" in more.json()["error"]["message"]
    read = await trial.read(session)
    (reward,) = read["records"][0]["rewards"]
    assert reward["value"] == MAX_ENTRIES - MAX_AT_ONCE
    assert (read["metadata"]["bytes"] - before) // MAX_ENTRIES in range(512, 600)


async def test_a_session_full_of_bytes_takes_no_more_rewards(stage: Stage) -> None:
    async with simulated_sessions(stage, options={"max_session_bytes": 100_000}) as trial:
        session = await episode(trial, 1)
        long = {"turn": 0, "name": "x", "value": "x" * 60_000}
        await put(trial, session, long)
        await put(trial, session, long)
        full = await trial.ask("POST", f"/sessions/{session}/rewards", GOOD)
        assert (full.status, "(max_session_bytes)" in full.json()["error"]["message"]) == (400, True)


# The client, and the dashboard


async def test_the_client_sets_rewards_and_collects_their_arrays(trial: SessionTrial) -> None:
    async with RouterClient(trial.router.url) as client, await client.create_session() as session:
        for text in ("Hi", "Hello"):
            await session.chat([user(text)], max_tokens=8, ignore_eos=True)
        await session.set_rewards({"turn": 0, "reward": 0.5}, {"segment": 1, "name": "advantage", "value": -1.0})
        one, two = await session.collect(per_token=BOTH_ARRAYS, reward=1.0)
        assert (one.reward, one.per_token["reward"].sum(), one.per_token["reward"][-1]) == (1.0, 0.5, 0.5)
        assert two.per_token["advantage"].tolist() == (-1.0 * two.loss_mask).tolist()
        for wrong, error in (({"turn": 9, "reward": 1.0}, NotFound), ({"turn": 0}, ErrorReply)):
            with pytest.raises(error):
                await session.set_rewards({"turn": 0, "reward": 7.0}, wrong)
        with pytest.raises(ValueError, match="nan"):
            await session.set_rewards({"turn": 0, "reward": float("nan")})
        records = (await session.records(compact=True))["records"]
        assert records[0]["rewards"] == [{"turn": 0, "name": "reward", "value": 0.5}]


@pytest.mark.parametrize("text", ["on", "off"])
async def test_episodes_of_the_dashboard_have_rewards_and_hide_their_texts(stage: Stage, text: str) -> None:
    async with simulated_sessions(stage, settings={"dashboard_text": text}) as trial:
        session = await episode(trial, 1)
        await put(trial, session, {"turn": 0, "reward": 0.5}, {"turn": 0, "name": "why", "value": "It adds."})
        detail = (await trial.ask("GET", f"/router/episodes/{session}")).json()
        assert detail["turns"][0]["rewards"] == [
            {"turn": 0, "name": "reward", "value": 0.5},
            {"turn": 0, "name": "why", "value": "It adds." if text == "on" else None},
        ]
        tokens = await trial.ask("GET", f"/router/episodes/{session}/tokens")
        assert (b"It adds." in tokens.body) == (text == "on")
