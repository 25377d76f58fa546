"""Audits: what was recorded is held against what the engines say of the same tokens now. What is right passes, each
thing that can be wrong is found, and what cannot be compared is no alarm."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from middleware_hub.auditing.tool.command import DIFFERENT, GOOD, NOTHING_COMPARABLE
from miles_router import cli
from miles_router.client import RouterClient
from miles_router.settings.config import MiddlewareSpec
from miles_router.testing import SimulatedWorker
from miles_router.trajectory import Piece
from tests.support.audits import (
    LONG,
    audited,
    damaged,
    episode,
    forget_all,
    layer_of,
    shifted,
    spoil,
    text_rollout,
    text_rollouts,
    turns_of,
)
from tests.support.cache_trial import CACHE, SHORT, checkpoint
from tests.support.http import ask
from tests.support.layers import post
from tests.support.ports import free_ports
from tests.support.restarts import StateDirectories
from tests.support.running_router import COMMAND
from tests.support.session_trial import ADD, SessionTrial, qwen3, session_trial, simulated_sessions, user
from tests.support.stage import Stage, staged
from tests.support.under_way import under_way
from tests.support.waiting import PATIENCE, until

GENERATE = "/generate"
DATA = "data-key"
KINDS = ("session", "text")
TEXTS = (MiddlewareSpec(CACHE),)
#: Of a text.
SAMPLED = {"max_new_tokens": LONG["max_tokens"], "ignore_eos": True}
#: Why prompts of three turns of a text are not rendered anew.
UNWRITTEN = {"no_messages": 3}


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[SessionTrial]:
    async with staged() as stage, simulated_sessions(stage, more=TEXTS) as made:
        yield made


@pytest.fixture
async def trial(shared: SessionTrial) -> AsyncIterator[SessionTrial]:
    shared.worker.log.clear()
    yield shared
    await forget_all(shared)


of_each_kind = pytest.mark.parametrize("kind", KINDS)


async def recorded(trial: SessionTrial, kind: str, turns: int = 3, **sampling: Any) -> str:
    """A good episode of so many turns; its id."""
    if kind == "text":
        return await text_rollout(trial, turns, sampling_params=sampling)
    session = await trial.create()
    await episode(trial, session, turns, **sampling)
    return session


async def go_on(trial: SessionTrial, kind: str, made: str, more: str = " and so on.", leaf: int | None = None) -> None:
    """One more turn of an episode."""
    if kind == "session":
        (turn,) = turns_of(trial, made)
        await trial.chat(made, [*map(dict, (*turn.appended, turn.answer)), user(more)], **LONG)
        return
    (rollout,) = [each for each in text_rollouts(trial) if each.id == made]
    entry = rollout.turns[max(rollout.turns) if leaf is None else leaf].entry
    body = {"text": layer_of(trial, "cache").cache.text_of(entry) + more, "sampling_params": SAMPLED}
    assert (await trial.ask("POST", GENERATE, body)).status == 200


async def held(trial: SessionTrial, kind: str, made: str) -> list[Any]:
    """What a trainer gets of an episode: its samples, or what is retrieved of its leaves."""
    if kind == "session":
        return await trial.samples(made)
    (rollout,) = [each for each in text_rollouts(trial) if each.id == made]
    found = [
        (await trial.ask("POST", "/retrieve_from_text", {"rid": leaf.entry.rid})).json() for leaf in rollout.leaves()
    ]
    return [{**each, "logprobs": each["rollout_logp"], "text": each["response"]} for each in found]


def numbers(trial: SessionTrial) -> list[Any]:
    """What the router has counted of sessions and texts, but for what is asked here."""
    texts = dict(trial.router.app.router.statistics["radix_tree"]())
    texts.pop("retrievals")
    return [trial.statistics(), texts]


async def audit(trial: SessionTrial, episode: str, **body: Any) -> Any:
    answer = await trial.ask("POST", f"/episodes/{quote(episode)}/audit", body)
    assert answer.status == 200, answer.body
    return answer.json()


async def only_reason(trial: SessionTrial, episode: str) -> str:
    """Why nothing of an episode can be compared."""
    (sample,) = (await audit(trial, episode))["samples"]
    assert (sample["compared"], sample["spans"]) == (0, [])
    (reason,) = sample["not_comparable"]
    return str(reason)


# What is right


@of_each_kind
async def test_what_was_recorded_well_passes(trial: SessionTrial, kind: str) -> None:
    made = await recorded(trial, kind)
    said = await audited(trial)
    assert said.status == GOOD
    assert said.report["total"]["quantiles"]["1.0"] == 0.0
    (sample,) = await held(trial, kind, made)
    rendered = {"compared": 3, "not_compared": {}} if kind == "session" else {"compared": 0, "not_compared": UNWRITTEN}
    assert said.report["prompts"] == {"differ": 0, "differences": [], **rendered}
    assert (said.report["samples"], said.report["not_comparable"]) == (1, {})
    assert said.report["sessions" if kind == "session" else "text_rollouts"] == 1
    assert said.report["total"]["tokens"] == sum(sample["loss_mask"]) > 0
    assert set(said.report["by_worker"]) == set(said.report["by_recomputed_by"]) == {trial.worker.url}
    assert (set(said.report["by_version"]), set(said.report["by_kind"])) == ({"1"}, {kind})


@of_each_kind
async def test_an_answer_has_both_logprobs_of_each_span_and_nothing_else_is_changed(
    trial: SessionTrial, kind: str
) -> None:
    made = await recorded(trial, kind)
    (sample,), before = await held(trial, kind, made), numbers(trial)
    trial.worker.log.clear()
    (found,) = (await audit(trial, made))["samples"]
    for span in found["spans"]:
        within = slice(span["start"], span["end"])
        assert span["recorded"] == span["recomputed"] == pytest.approx(sample["logprobs"][within])
        assert set(sample["loss_mask"][within]) == {1}
    assert sum(span["end"] - span["start"] for span in found["spans"]) == sum(sample["loss_mask"])
    assert (await held(trial, kind, made), numbers(trial)) == ([sample], before)
    (exchange,) = trial.worker.log.at(GENERATE)
    asked = json.loads(exchange.body)
    assert asked["input_ids"] == sample["tokens"][: found["spans"][-1]["end"]]
    assert asked["sampling_params"]["max_new_tokens"] == 0
    assert asked["logprob_start_len"] == found["spans"][0]["start"] - 1


async def test_audits_of_all_kinds_have_two_requests_under_way(trial: SessionTrial) -> None:
    made = [await recorded(trial, kind, 1) for kind in KINDS * 2]
    await trial.ask("POST", "/pause_generation", {"mode": "retract"})
    gate = trial.router.app.router.gate

    async def all_at_once() -> list[Any]:
        return await asyncio.gather(*(audit(trial, each) for each in made))

    async with under_way(all_at_once()) as all_of_them:
        await until(lambda: gate.held == 2, "two wait at the gate")
        await trial.ask("GET", "/sessions")  # the others have had their time
        assert gate.held == 2
        await trial.ask("POST", "/continue_generation", {})
        assert [each["samples"][0]["compared"] for each in await all_of_them] == [LONG["max_tokens"]] * 4


# What is wrong


@of_each_kind
async def test_logprobs_of_the_next_position_are_found_and_said(trial: SessionTrial, kind: str) -> None:
    for _ in range(4):  # among good ones
        await recorded(trial, "session")
        await recorded(trial, "text")
    wrong = await recorded(trial, kind)
    with damaged(trial, wrong, shifted):
        said = await audited(trial)
    assert said.status == DIFFERENT
    assert [part for part in said.report["too_far"] if part.startswith("sample")] == [f"sample {wrong}/2"]
    assert said.report["slip"] == 1


@of_each_kind
async def test_a_worker_whose_weights_are_not_what_it_says_is_found(stage: Stage, kind: str) -> None:
    """It agrees with itself; so another one is asked."""
    options: Any = {"tokenizer": qwen3(), "weight_version": "1"}
    async with SimulatedWorker(**options, seed=1) as right, SimulatedWorker(**options, seed=2) as wrong:
        trial = await session_trial(stage, right, wrong, more=TEXTS)
        for _ in range(4):
            made = await recorded(trial, kind, 1)
            for _ in range(2):  # workers take turns otherwise
                (sample,) = (await audit(trial, made))["samples"]
                (span,) = sample["spans"]
                assert {span["worker"], span["recomputed_by"]} == {right.url, wrong.url}
        said = await audited(trial)
    assert said.status == DIFFERENT
    assert {"worker", "recomputed_by"} <= said.parts


async def test_a_prompt_of_another_template_is_found_with_its_place_and_both_texts(
    stage: Stage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = tmp_path / "other.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    async with simulated_sessions(stage, settings={"chat_template_path": str(template)}) as trial:
        await episode(trial, await trial.create("other"), turns=1)
        said = await audited(trial)
    assert (said.status, said.report["too_far"]) == (DIFFERENT, []), "no logprob shows it"
    (difference,) = said.report["prompts"]["differences"]
    assert (difference["session_id"], difference["turn"], difference["position"]) == ("other", 0, 2)
    assert difference["held"]["text"].startswith("<|im_start|>system\nBe brief.")
    assert difference["rendered"]["text"].startswith("<|im_start|>system: Be brief.")
    assert "Be brief" not in caplog.text


# What cannot be compared


@of_each_kind
async def test_tokens_of_other_weights_are_counted_and_nothing_comparable_has_a_status(stage: Stage, kind: str) -> None:
    async with simulated_sessions(stage, more=TEXTS) as trial:
        made = await recorded(trial, kind, 1)
        trial.worker.log.clear()
        await trial.ask("POST", "/update_weight_version", {"new_version": "2", "abort_all_requests": False})
        assert await only_reason(trial, made) == "other_weights"
        assert trial.worker.log.at(GENERATE) == [], "no engine is asked for nothing"
        said = await audited(trial)
        assert (said.status, said.report["good"], said.report["total"]) == (NOTHING_COMPARABLE, None, None)
        assert set(said.report["not_comparable"]) == {"other_weights"}
        await go_on(trial, kind, made)
        (sample,) = (await audit(trial, made))["samples"]
        assert set(sample["not_comparable"]) == {"other_weights", "old_cache"}, "it goes on from the old cache"


RESHAPING: list[tuple[str, dict[str, Any]]] = [
    ("logit_bias", {"logit_bias": {"1000": 1.0}}),
    ("frequency_penalty", {"frequency_penalty": 0.5}),
    ("regex", {"regex": "[a-z]+"}),
    ("temperature", {"top_k": 1, "temperature": 0.5}),
]
OF_SESSIONS: list[tuple[str, dict[str, Any]]] = [
    ("min_tokens", {"min_tokens": 8}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("tool_choice", {"tools": [ADD], "tool_choice": "required"}),
]
LEFT_AS_THEY_ARE: list[dict[str, Any]] = [
    {"temperature": 0},
    {"top_p": 0.5},
    {"top_k": 4},
    {"min_p": 0.1},
    {"top_k": 1},
]


async def test_settings_that_reshape_logprobs_are_no_alarm(trial: SessionTrial) -> None:
    for reason, fields in [*RESHAPING, *OF_SESSIONS]:
        session = await trial.create()
        await trial.chat(session, [user("Hi")], **fields)
        assert await only_reason(trial, session) == f"reshaped_by_{reason}"
    for reason, fields in [*RESHAPING, ("min_new_tokens", {"min_new_tokens": 8})]:
        made = await text_rollout(trial, 1, f"Of {reason}.", sampling_params=fields)
        assert await only_reason(trial, made) == f"reshaped_by_{reason}"
    for kind, fields in itertools.product(KINDS, LEFT_AS_THEY_ARE):
        (sample,) = (await audit(trial, await recorded(trial, kind, 1, **fields)))["samples"]
        assert sample["compared"] > 0, (kind, fields)
        await forget_all(trial)


@of_each_kind
async def test_what_was_sampled_at_another_temperature_is_asked_for_token_by_token(
    trial: SessionTrial, kind: str
) -> None:
    made = await recorded(trial, kind, temperature=0.6)
    trial.worker.log.clear()
    (sample,), (whole,) = (await audit(trial, made))["samples"], await held(trial, kind, made)
    assert (sample["compared"], sample["not_comparable"]) == (32, {"not_asked": 3 * LONG["max_tokens"] - 32})
    assert {span["turn"] for span in sample["spans"]} == {0, 1, 2}
    for exchange, span in zip(trial.worker.log.at(GENERATE), sample["spans"], strict=True):
        asked, position = exchange.json(), span["start"]
        assert [*asked["input_ids"], *asked["token_ids_logprob"]] == whole["tokens"][: position + 1]
        assert asked["sampling_params"]["temperature"] == 0.6
        assert span["recorded"] == span["recomputed"] == pytest.approx([whole["logprobs"][position]])


async def test_prompts_without_messages_are_no_alarm(trial: SessionTrial) -> None:
    session = await trial.create()
    answer = await trial.ask("POST", f"/sessions/{session}/v1/completions", {"model": "m", "prompt": "Hi"})
    assert answer.status == 200
    await trial.chat(session, [user("Hi"), {"role": "assistant", "content": "I"}], continue_final_message=True)
    found = await audit(trial, session)
    assert sum(sample["compared"] for sample in found["samples"]) > 0
    assert found["prompts"]["not_compared"] == {"no_messages": 1, "continue_final_message": 1}


@of_each_kind
async def test_what_an_engine_refuses_or_garbles_is_no_alarm(trial: SessionTrial, kind: str) -> None:
    made = await recorded(trial, kind, 1)
    for status, body, reason in ((400, b'{"error":{"message":"no room"}}', "refused"), (200, b"{}", "unreadable")):
        trial.worker.faults.status(status, body=body, path=GENERATE)
        (sample,) = (await audit(trial, made))["samples"]
        assert (sample["compared"], set(sample["not_comparable"]), len(sample["refusals"])) == (0, {reason}, 1)
        assert (await audited(trial)).status == GOOD, "the next one is answered"


@of_each_kind
async def test_logprobs_of_weights_that_came_meanwhile_are_not_compared(trial: SessionTrial, kind: str) -> None:
    made = await recorded(trial, kind, 1)
    (span,) = (await audit(trial, made))["samples"][0]["spans"]
    asked = trial.worker.log.at(GENERATE)[-1].json()
    entries = [[-1.0, token, None] for token in asked["input_ids"][span["start"] - 1 :]]
    meta = {"finish_reason": {"type": "length"}, "input_token_logprobs": entries, "weight_version": "2"}
    trial.worker.faults.status(200, body=json.dumps({"meta_info": meta}).encode(), path=GENERATE)
    assert await only_reason(trial, made) == "other_weights"


# Who may, and how


async def test_it_takes_the_clients_key_and_not_that_of_a_session(stage: Stage) -> None:
    keys = {"api_key": DATA, "admin_api_key": "admin"}
    async with simulated_sessions(stage, more=TEXTS, settings=keys) as trial:
        bearer = [("Authorization", f"Bearer {DATA}")]
        made = await trial.ask("POST", "/sessions", {"session_id": "mine", "contract": {"key": True}}, bearer)
        own = [("Authorization", f"Bearer {made.json()['api_key']}")]
        for path in ("/sessions/mine/audit", "/episodes/mine/audit"):
            for headers, status in ((own, 401), ((), 401), (bearer, 200)):
                assert (await trial.ask("POST", path, {}, headers)).status == status
        for headers, status in ((own, 401), ((), 401), (bearer, 200)):
            assert (await trial.ask("GET", "/episodes", None, headers)).status == status
        await trial.turn("mine", [user("Hi")], bearer, **LONG)
        assert (await audited(trial, "--api-key", DATA)).status == GOOD


async def test_wrong_requests_are_refused_by_name(trial: SessionTrial) -> None:
    session = await trial.create()
    for path in (f"/sessions/{session}/audit", f"/episodes/{session}/audit"):
        for body, words in (
            ({"limit": 0}, "limit"),
            ({"limit": 65}, "limit"),
            ({"limit": True}, "limit"),
            ({"n": 1}, "unknown field 'n'"),
            ([], "object"),
        ):
            answer = await trial.ask("POST", path, body)
            assert (answer.status, words in answer.json()["error"]["message"]) == (400, True)
    for path in ("/sessions/none/audit", "/episodes/text@0/audit"):
        answer = await trial.ask("POST", path, {})
        assert (answer.status, answer.json()["error"]["type"]) == (404, "not_found")


@of_each_kind
async def test_the_newest_samples_of_an_episode_are_audited(trial: SessionTrial, kind: str) -> None:
    if kind == "session":
        made = await trial.create()
        for text in ("one", "two", "three"):
            await trial.chat(made, [user(text)], **LONG)
    else:
        made = await text_rollout(trial, 1)
        for more in (" and", " but", " or"):
            await go_on(trial, kind, made, more, leaf=0)
    async with RouterClient(trial.router.url) as client:
        found = await client.audit(made, limit=2)
        assert kind == "text" or (await client.session(made).audit(limit=2))["samples"] == found["samples"]
    assert [sample["leaf"] for sample in found["samples"]] == ([1, 2] if kind == "session" else [2, 3])


async def test_an_audit_of_a_text_shows_neither_text_nor_ids(trial: SessionTrial) -> None:
    made = await text_rollout(trial, prompt="Be brief. Secretly")
    told = json.dumps(await audit(trial, made))
    (whole,) = await held(trial, "text", made)
    assert "Secretly" not in told
    assert whole["text"][-20:] not in told
    assert json.dumps(whole["tokens"][:3])[1:-1] not in told


async def test_texts_are_audited_after_a_kill_as_they_were_asked_for(tmp_path: Path) -> None:
    async with SimulatedWorker(tokenizer=checkpoint(), weight_version="1") as worker:
        restarts = StateDirectories(worker, tmp_path)
        texts: list[str] = []
        async with restarts.router(*TEXTS, hf_checkpoint=checkpoint()) as before:
            for params in ({}, {"frequency_penalty": 0.5}):
                body = {"text": f"Question {params}?", "sampling_params": {**SHORT, **params}}
                answer = await post(before.url, GENERATE, body)
                texts.append(body["text"] + answer.json()["text"])
            async with restarts.router(*TEXTS, hf_checkpoint=checkpoint()) as after:
                assert (await ask(after.url, "GET", "/episodes")).json()["episodes"] == [], (
                    "what nobody has asked for is not in memory"
                )
                for text in texts:
                    assert (await post(after.url, "/retrieve_from_text", {"text": text})).status == 200
                found = {}
                for each in (await ask(after.url, "GET", "/episodes")).json()["episodes"]:
                    answer = await post(after.url, f"/episodes/{quote(each['id'])}/audit", {})
                    (sample,) = answer.json()["samples"]
                    found[sample["compared"]] = sample
    tokens = SHORT["max_new_tokens"]
    assert found[0]["not_comparable"] == {"reshaped_by_frequency_penalty": tokens}
    assert {span["worker"] for span in found[tokens]["spans"]} == {worker.url}


# The command


def command(*flags: str) -> subprocess.CompletedProcess[str]:
    """`miles-router audit` to its end."""
    return subprocess.run(
        [str(COMMAND), "audit", *flags], capture_output=True, text=True, timeout=PATIENCE, check=False
    )


async def test_the_command_says_in_words_what_it_found_and_draws_it(trial: SessionTrial, tmp_path: Path) -> None:
    wrong, picture = await trial.create("wrong"), tmp_path / "audit.png"
    await episode(trial, wrong)
    await text_rollout(trial)
    flags = ("--router", trial.router.url)
    done = await asyncio.to_thread(command, *flags, "--plot", str(picture))
    assert (done.returncode, done.stderr) == (GOOD, "")
    assert done.stdout.splitlines()[0] == "2 samples of 1 sessions and 1 text rollouts"
    assert "GOOD: 0.95 of 28" in done.stdout  # a text may begin within a token of the answer before it
    assert "tokens lie within 0 nats" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    with damaged(trial, wrong, shifted):
        done = await asyncio.to_thread(command, *flags)
    assert done.returncode == DIFFERENT
    assert "TOO FAR: sample wrong/2" in done.stdout
    assert "they are shifted by one" in done.stdout
    first = turns_of(trial, wrong)[0]
    spoil(first, "given", Piece.given([*first.given.tokens[:-1].tolist(), 77]))
    done = await asyncio.to_thread(command, *flags)
    assert done.returncode == DIFFERENT
    assert "DIFFERENT PROMPTS" in done.stdout
    assert "session wrong, turn 0, position" in done.stdout


def test_the_command_says_in_one_line_what_is_wrong_with_a_flag_or_a_router(
    capsys: pytest.CaptureFixture[str],
) -> None:
    nobody = f"http://127.0.0.1:{free_ports(1)[0]}"
    for flags, words in (
        (("--router", nobody), "127.0.0.1"),
        (("--router", "nowhere"), "base_url"),
        (("--router", "http://x", "--sample", "0"), "--sample"),
        (("--router", "http://x", "--quantile", "2"), "--quantile"),
        (("--router", "http://x", "--nothing"), "--nothing"),
        (("--router", "http://x", "--plot", "audit.txt"), "audit.txt"),
        (("--router", "http://x", "--plot", "no-folder/audit.png"), "no-folder"),
        ((), "--router"),
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(["audit", *flags])
        said = capsys.readouterr()
        assert (end.value.code, said.out) == (2, "")
        assert words in said.err.splitlines()[-1]


async def test_json_has_nothing_that_a_terminal_would_obey(trial: SessionTrial) -> None:
    await episode(trial, await trial.create("wrong"), turns=1)
    (turn,) = turns_of(trial, "wrong")
    escape = trial.router.app.router.tokenizer.encode("\x9b2J\u202e\x7f", add_special_tokens=False)
    spoil(turn, "given", Piece.given([*escape, *turn.given.tokens.tolist()[len(escape) :]]))
    for flags in ((), ("--json",)):
        done = await asyncio.to_thread(command, "--router", trial.router.url, *flags)
        assert done.returncode == DIFFERENT
        assert not [each for each in done.stdout if not each.isprintable() and each != "\n"]
        assert "x9b2J" in done.stdout or "u009b2J" in done.stdout
