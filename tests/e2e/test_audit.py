"""Audits: what was recorded is held against what the engines say of the same tokens now. What is right passes, each
thing that can be wrong is found, and what cannot be compared is no alarm."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from miles_router import cli
from miles_router.audit.collecting import Sampling, collect
from miles_router.audit.command import DIFFERENT, GOOD, NOTHING_COMPARABLE
from miles_router.client import RouterClient
from miles_router.testing import SimulatedWorker
from miles_router.trajectory import Piece
from tests.support.audits import LONG, SYSTEM, audited, damaged, episode, foreign, shifted, turns_of
from tests.support.pairs import halves
from tests.support.ports import free_ports
from tests.support.running_router import COMMAND
from tests.support.session_trial import ADD, SessionTrial, qwen3, session_trial, simulated_sessions, user
from tests.support.stage import Stage, staged
from tests.support.tokenizers import tokenizer_directory
from tests.support.under_way import under_way
from tests.support.waiting import PATIENCE, until

GENERATE = "/generate"
DATA = "data-key"


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[SessionTrial]:
    async with staged() as stage, simulated_sessions(stage) as made:
        yield made


@pytest.fixture
async def trial(shared: SessionTrial) -> AsyncIterator[SessionTrial]:
    shared.worker.door.clear()
    yield shared
    for session in (await shared.ask("GET", "/sessions")).json()["sessions"]:
        await shared.ask("DELETE", f"/sessions/{session['session_id']}")


async def audit(trial: SessionTrial, session: str, **body: Any) -> Any:
    answer = await trial.ask("POST", f"/sessions/{session}/audit", body)
    assert answer.status == 200, answer.body
    return answer.json()


async def only_reason(trial: SessionTrial, session: str) -> str:
    """Why nothing of a session can be compared."""
    (sample,) = (await audit(trial, session))["samples"]
    assert (sample["compared"], sample["spans"]) == (0, [])
    (reason,) = sample["not_comparable"]
    return str(reason)


# What is right


async def test_what_was_recorded_well_passes(trial: SessionTrial) -> None:
    session = await trial.create()
    await episode(trial, session)
    said = await audited(trial)
    assert said.status == GOOD
    assert said.report["total"]["quantiles"]["1.0"] == 0.0
    assert said.report["prompts"] == {"compared": 3, "differ": 0, "differences": [], "not_compared": {}}
    assert (said.report["samples"], said.report["not_comparable"]) == (1, {})
    sampled = sum(record["completion_tokens"] for record in await trial.records(session))
    assert said.report["total"]["tokens"] == sampled
    assert set(said.report["by_worker"]) == set(said.report["by_recomputed_by"]) == {trial.worker.url}
    assert set(said.report["by_version"]) == {"1"}


async def test_an_answer_has_both_logprobs_of_each_span_and_nothing_else_is_changed(trial: SessionTrial) -> None:
    session = await trial.create()
    await episode(trial, session)
    before, statistics = await trial.records(session), trial.statistics()
    (sample,) = await trial.samples(session)
    (found,) = (await audit(trial, session))["samples"]
    for span in found["spans"]:
        within = slice(span["start"], span["end"])
        assert span["recorded"] == span["recomputed"] == pytest.approx(sample["logprobs"][within])
        assert set(sample["loss_mask"][within]) == {1}
    assert sum(span["end"] - span["start"] for span in found["spans"]) == sum(sample["loss_mask"])
    assert (await trial.records(session), trial.statistics()) == (before, statistics)
    (exchange,) = trial.worker.door.at(GENERATE)
    asked = json.loads(exchange.body)
    assert asked["input_ids"] == sample["tokens"][: found["spans"][-1]["end"]]
    assert asked["sampling_params"]["max_new_tokens"] == 0
    assert asked["logprob_start_len"] == found["spans"][0]["start"] - 1


async def test_a_token_that_branches_share_is_compared_once(trial: SessionTrial) -> None:
    session = await trial.create()
    history = await episode(trial, session)
    await trial.chat(session, [*history[:-1], user("Something else")], **LONG)
    await trial.chat(session, [*history[:-1], user("And else")], **LONG)
    samples = (await audit(trial, session))["samples"]
    compared = [span["turn"] for sample in samples for span in sample["spans"]]
    assert sorted(compared) == [0, 1, 2, 3, 4]


async def test_a_session_may_go_on_while_it_is_audited(trial: SessionTrial) -> None:
    session = await trial.create()
    history = await episode(trial, session)
    await trial.ask("POST", "/pause_generation", {"mode": "retract"})
    async with under_way(audit(trial, session)) as auditing, under_way(trial.chat(session, history, **LONG)) as going:
        await until(lambda: trial.router.app.router.gate.held == 2, "both wait at the gate")
        await trial.ask("POST", "/continue_generation", {})
        (sample,) = (await auditing)["samples"]
        await going
    assert (sample["leaf"], [span["turn"] for span in sample["spans"]]) == (2, [0, 1, 2])


async def test_an_audit_whose_client_leaves_ends(trial: SessionTrial) -> None:
    session = await trial.create()
    await episode(trial, session, turns=1)
    await trial.ask("POST", "/pause_generation", {"mode": "retract"})
    gate = trial.router.app.router.gate
    async with under_way(audit(trial, session)):
        await until(lambda: gate.held == 1, "it waits at the gate")
    await until(lambda: gate.held == 0, "it is gone")
    await trial.ask("POST", "/continue_generation", {})
    assert trial.worker.door.at(GENERATE) == []


async def test_a_prefill_half_tells_the_logprobs_of_a_pair(stage: Stage) -> None:
    trial = await session_trial(stage, hf_checkpoint=tokenizer_directory("qwen3"))
    async with halves(stage, router=trial.router, worker={"tokenizer": qwen3(), "weight_version": "1"}):
        await episode(trial, await trial.create())
        said = await audited(trial)
    assert (said.status, said.report["total"]["tokens"]) == (GOOD, 144)


# What is wrong


async def test_logprobs_of_the_next_position_are_found_and_said(trial: SessionTrial) -> None:
    for _ in range(8):  # among good ones
        await episode(trial, await trial.create())
    wrong = await trial.create("wrong")
    await episode(trial, wrong)
    with damaged(trial, wrong, shifted):
        said = await audited(trial)
    assert said.status == DIFFERENT
    assert [part for part in said.report["too_far"] if part.startswith("sample")] == ["sample wrong/2"]
    assert said.report["slip"] == 1


async def test_foreign_ids_are_found(trial: SessionTrial) -> None:
    wrong = await trial.create("wrong")
    await episode(trial, wrong)
    with damaged(trial, wrong, foreign):
        said = await audited(trial, "--session", "wrong")
    assert (said.status, said.report["slip"]) == (DIFFERENT, None)
    assert said.parts == {"all", "sample", "worker", "recomputed_by", "version"}


async def test_a_worker_whose_weights_are_not_what_it_says_is_found(stage: Stage) -> None:
    """It agrees with itself; so another one is asked."""
    options: Any = {"tokenizer": qwen3(), "weight_version": "1"}
    async with SimulatedWorker(**options, seed=1) as right, SimulatedWorker(**options, seed=2) as wrong:
        trial = await session_trial(stage, right, wrong)
        for _ in range(4):
            session = await trial.create()
            await episode(trial, session, turns=1)
            for _ in range(2):  # workers take turns otherwise
                (sample,) = (await audit(trial, session))["samples"]
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


async def test_tokens_of_other_weights_are_counted_and_nothing_comparable_has_its_own_status(
    stage: Stage,
) -> None:
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        history = await episode(trial, session, turns=1)
        await trial.ask("POST", "/update_weight_version", {"new_version": "2", "abort_all_requests": False})
        assert await only_reason(trial, session) == "other_weights"
        assert trial.worker.door.at(GENERATE) == [], "no engine is asked for nothing"
        said = await audited(trial)
        assert (said.status, said.report["good"], said.report["total"]) == (NOTHING_COMPARABLE, None, None)
        assert set(said.report["not_comparable"]) == {"other_weights"}
        await trial.chat(session, history, **LONG)
        (sample,) = (await audit(trial, session))["samples"]
        assert set(sample["not_comparable"]) == {"other_weights", "old_cache"}, "it goes on from the old cache"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"logit_bias": {"1000": 1.0}}, "logit_bias"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"min_tokens": 8}, "min_tokens"),
        ({"regex": "[a-z]+"}, "regex"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [ADD], "tool_choice": "required"}, "tool_choice"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
async def test_settings_that_reshape_logprobs_are_no_alarm(
    trial: SessionTrial, fields: dict[str, Any], reason: str
) -> None:
    session = await trial.create()
    await trial.chat(session, [user("Hi")], **fields)
    assert await only_reason(trial, session) == f"reshaped_by_{reason}"


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"top_p": 0.5}, {"top_k": 4}, {"min_p": 0.1}, {"seed": 3}])
async def test_settings_that_leave_logprobs_as_they_are_are_compared(
    trial: SessionTrial, fields: dict[str, Any]
) -> None:
    session = await trial.create()
    await trial.chat(session, [user("Hi")], **fields)
    (sample,) = (await audit(trial, session))["samples"]
    assert sample["compared"] > 0


async def test_what_was_sampled_at_another_temperature_is_asked_for_token_by_token(trial: SessionTrial) -> None:
    session = await trial.create()
    await episode(trial, session, temperature=0.6)
    (sample,), (held,) = (await audit(trial, session))["samples"], await trial.samples(session)
    assert (sample["compared"], sample["not_comparable"]) == (32, {"not_asked": 3 * LONG["max_tokens"] - 32})
    assert {span["turn"] for span in sample["spans"]} == {0, 1, 2}
    for exchange, span in zip(trial.worker.door.at(GENERATE), sample["spans"], strict=True):
        asked, position = exchange.json(), span["start"]
        assert [*asked["input_ids"], *asked["token_ids_logprob"]] == held["tokens"][: position + 1]
        assert asked["sampling_params"]["temperature"] == 0.6
        assert span["recorded"] == span["recomputed"] == pytest.approx([held["logprobs"][position]])


async def test_the_temperature_that_an_engine_assumes_counts(stage: Stage, tmp_path: Path) -> None:
    shutil.copytree(tokenizer_directory("qwen3"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.95}')
    async with simulated_sessions(stage, settings={"hf_checkpoint": str(tmp_path)}) as trial:
        cases: list[tuple[dict[str, Any], float]] = [({}, 0.6), ({"temperature": 1}, 0)]
        for fields, asked in cases:
            session = await trial.create()
            await trial.chat(session, [user("Hi")], **fields)
            assert (await audit(trial, session))["samples"][0]["compared"] > 0
            assert trial.worker.door.at(GENERATE)[-1].json()["sampling_params"]["temperature"] == asked


async def test_the_adapter_that_answered_is_asked(stage: Stage) -> None:
    async with simulated_sessions(stage, enable_lora=True) as trial:
        await trial.ask("POST", "/load_lora_adapter", {"lora_name": "poet", "lora_path": "/poet"})
        named: list[dict[str, Any]] = [{"lora_path": "poet"}, {"model": "default:poet"}]
        for fields in named:
            session = await trial.create()
            await trial.chat(session, [user("Hi")], **fields)
            trial.worker.door.clear()
            (sample,) = (await audit(trial, session))["samples"]
            assert sample["compared"] > 0
            (exchange,) = trial.worker.door.at(GENERATE)
            assert [each.lora_path for each in exchange.generations] == ["poet"]


async def test_what_is_longer_than_the_engine_takes_is_left_out(stage: Stage) -> None:
    async with simulated_sessions(stage, context_len=200) as trial:
        session = await trial.create()
        await trial.chat(session, [SYSTEM, user("Hi")], max_tokens=None, ignore_eos=True)
        (sample,) = (await audit(trial, session))["samples"]
    assert sample["compared"] > 0
    assert set(sample["not_comparable"]) == {"context"}
    assert sample["refusals"] == []


async def test_prompts_without_messages_are_no_alarm(trial: SessionTrial) -> None:
    session = await trial.create()
    answer = await trial.ask("POST", f"/sessions/{session}/v1/completions", {"model": "m", "prompt": "Hi"})
    assert answer.status == 200
    await trial.chat(session, [user("Hi"), {"role": "assistant", "content": "I"}], continue_final_message=True)
    found = await audit(trial, session)
    assert sum(sample["compared"] for sample in found["samples"]) > 0
    assert found["prompts"]["not_compared"] == {"no_messages": 1, "continue_final_message": 1}


async def test_what_an_engine_refuses_or_garbles_is_no_alarm(trial: SessionTrial) -> None:
    session = await trial.create()
    await episode(trial, session, turns=1)
    for status, body, reason in ((400, b'{"error":{"message":"no room"}}', "refused"), (200, b"{}", "unreadable")):
        trial.worker.faults.status(status, body=body, path=GENERATE)
        (sample,) = (await audit(trial, session))["samples"]
        assert (sample["compared"], set(sample["not_comparable"]), len(sample["refusals"])) == (0, {reason}, 1)
        assert (await audited(trial)).status == GOOD, "the next one is answered"


async def test_one_that_a_pause_ended_is_asked_again(trial: SessionTrial) -> None:
    session = await trial.create()
    await episode(trial, session, turns=1)
    cut = b'{"meta_info": {"finish_reason": {"type": "abort"}}}'
    trial.worker.faults.status(200, body=cut, path=GENERATE, times=2)
    assert (await audited(trial)).status == GOOD
    trial.worker.faults.status(200, body=cut, path=GENERATE, times=3)
    assert await only_reason(trial, session) == "cut"


async def test_logprobs_of_weights_that_came_meanwhile_are_not_compared(trial: SessionTrial) -> None:
    session = await trial.create()
    await episode(trial, session, turns=1)
    (span,) = (await audit(trial, session))["samples"][0]["spans"]
    asked = trial.worker.door.at(GENERATE)[-1].json()
    entries = [[-1.0, token, None] for token in asked["input_ids"][span["start"] - 1 :]]
    meta = {"finish_reason": {"type": "length"}, "input_token_logprobs": entries, "weight_version": "2"}
    trial.worker.faults.status(200, body=json.dumps({"meta_info": meta}).encode(), path=GENERATE)
    assert await only_reason(trial, session) == "other_weights"


# Who may, and how


async def test_it_takes_the_clients_key_and_not_that_of_a_session(stage: Stage) -> None:
    async with simulated_sessions(stage, settings={"api_key": DATA, "admin_api_key": "admin"}) as trial:
        bearer = [("Authorization", f"Bearer {DATA}")]
        made = await trial.ask("POST", "/sessions", {"session_id": "mine", "contract": {"key": True}}, bearer)
        own = [("Authorization", f"Bearer {made.json()['api_key']}")]
        for headers, status in ((own, 401), ((), 401), (bearer, 200)):
            assert (await trial.ask("POST", "/sessions/mine/audit", {}, headers)).status == status
        await trial.turn("mine", [user("Hi")], bearer, **LONG)
        assert (await audited(trial, "--api-key", DATA)).status == GOOD


async def test_wrong_requests_are_refused_by_name(trial: SessionTrial) -> None:
    session = await trial.create()
    for body, words in (({"limit": 0}, "limit"), ({"limit": True}, "limit"), ({"n": 1}, "unknown field 'n'")):
        answer = await trial.ask("POST", f"/sessions/{session}/audit", body)
        assert (answer.status, words in answer.json()["error"]["message"]) == (400, True)
    assert (await trial.ask("POST", "/sessions/none/audit", {})).json()["error"]["type"] == "session_not_found"


async def test_the_newest_samples_of_a_session_are_audited(trial: SessionTrial) -> None:
    session = await trial.create()
    for text in ("one", "two", "three"):
        await trial.chat(session, [user(text)], **LONG)
    async with RouterClient(trial.router.url) as client:
        found = await client.session(session).audit(limit=2)
    assert [sample["leaf"] for sample in found["samples"]] == [1, 2]


async def test_sessions_are_drawn_until_there_is_enough(trial: SessionTrial) -> None:
    for _ in range(5):
        await episode(trial, await trial.create(), turns=1)
    await trial.create()  # nothing to audit
    said = await audited(trial, "--sample", "3", "--seed", "1")
    assert (said.status, said.report["samples"]) == (GOOD, 3)


# The command


def command(*flags: str) -> subprocess.CompletedProcess[str]:
    """`miles-router audit` to its end."""
    return subprocess.run(
        [str(COMMAND), "audit", *flags], capture_output=True, text=True, timeout=PATIENCE, check=False
    )


async def test_the_command_says_in_words_what_it_found_and_draws_it(trial: SessionTrial, tmp_path: Path) -> None:
    wrong, picture = await trial.create("wrong"), tmp_path / "audit.png"
    await episode(trial, wrong)
    flags = ("--router", trial.router.url)
    done = await asyncio.to_thread(command, *flags, "--plot", str(picture))
    assert (done.returncode, done.stderr) == (GOOD, "")
    assert done.stdout.splitlines()[0] == "1 samples of 1 sessions"
    assert "GOOD: 0.95 of 144 tokens lie within 0.0000 nats" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    with damaged(trial, wrong, shifted):
        done = await asyncio.to_thread(command, *flags)
    assert done.returncode == DIFFERENT
    assert "TOO FAR: sample wrong/2" in done.stdout
    assert "they are shifted by one" in done.stdout
    turns_of(trial, wrong)[0].given = Piece.given([*turns_of(trial, wrong)[0].given.tokens[:-1].tolist(), 77])
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
        ((), "--router"),
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(["audit", *flags])
        said = capsys.readouterr()
        assert (end.value.code, said.out) == (2, "")
        assert words in said.err.splitlines()[-1]


def test_its_help_says_what_each_exit_status_means() -> None:
    shown = command("--help").stdout
    assert all(f"  {status}  " in shown for status in (GOOD, DIFFERENT, 2, NOTHING_COMPARABLE))


async def test_who_watches_sees_how_far_it_is(trial: SessionTrial) -> None:
    await episode(trial, await trial.create(), turns=1)
    reader, terminal = pty.openpty()
    flags = ("--router", trial.router.url, "--sample", "1")
    done = await asyncio.to_thread(subprocess.run, [str(COMMAND), "audit", *flags], stderr=terminal, timeout=PATIENCE)
    os.close(terminal)
    shown = os.read(reader, 4096).decode()
    os.close(reader)
    assert done.returncode == GOOD
    assert shown.startswith("\raudit [------------------------] 0/1")
    assert shown.rstrip().endswith("audit [########################] 1/1")


async def test_sessions_are_asked_for_no_faster_than_told(trial: SessionTrial) -> None:
    for _ in range(3):
        await trial.chat(await trial.create(), [user("Hi")])
    async with RouterClient(trial.router.url) as client:
        began = time.monotonic()
        found = await collect(client, Sampling(count=3, rate=10.0), lambda done, of: None)
    assert found.sessions == 3
    assert time.monotonic() - began >= 0.2
