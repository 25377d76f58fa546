"""Numbers of an engine that cannot be: logprobs make an answer unusable, and counts of tokens are left out."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from tests.support.cache_trial import trial_before
from tests.support.http import whole_or_cut
from tests.support.scripted_chat import DONE, PROMPT, chat_answer, chat_events, delta, event, meta_of, streamed
from tests.support.scripted_worker import Behaviour, ScriptedWorker, reply, script
from tests.support.session_apis import CHATS, RESPONSES, Api, case
from tests.support.session_trial import CHAT, SessionTrial, user
from tests.support.stage import Stage

JSON = [("Content-Type", "application/json")]
IDS = [7, 8]


@pytest.fixture
async def worker(stage: Stage) -> ScriptedWorker:
    return await stage.worker()


# Logprobs


def entry_of(logprob: Any) -> tuple[Any, Any]:
    """A token's logprob: the logprobs of a chunk, and the entry behind that of the first token in a whole answer."""
    entry = {"token": "", "bytes": [], "logprob": logprob, "top_logprobs": []}
    return {"content": [entry]}, [[logprob, 8, None]]


NUMBERS: dict[str, tuple[Any, Any]] = {repr(each): entry_of(each) for each in (0.5, None, "x", [-0.5], False, "-0.5")}
#: A router that has seen one of these asks the engine for whole answers from then on.
MISSING: dict[str, tuple[Any, Any]] = {"missing": ({"content": []}, []), "no logprobs": (None, [])}
LISTS: dict[str, tuple[Any, Any]] = {
    "null among them": ({"content": [None]}, [None]),
    "an empty entry": ({"content": [{}]}, [[]]),
    "a number": ({"content": [-0.5]}, [-0.5]),
    "no list": ({"content": 7}, [7]),
    "no object": (7, [7]),
}


def answered(odd: tuple[Any, Any], *, stream: bool) -> Behaviour:
    """An answer whose second token has these logprobs."""
    of_chunk, of_answer = odd
    if not stream:
        meta = meta_of(IDS, output_token_logprobs=[[-0.5, 7, None], *of_answer])
        return script(reply(json.dumps(chat_answer(IDS, meta_info=meta)).encode(), headers=JSON))
    begun, first, _, *end = chat_events(IDS, ["Hel", "lo"])
    return streamed(begun, first, event([delta("lo", logprobs=of_chunk)]), *end)


async def is_an_invalid_answer(
    trial: SessionTrial, worker: ScriptedWorker, api: Api, session: str, said: bytes, *, stream: bool
) -> None:
    """A turn whose client is told an error, and whose worker is flagged."""
    before = trial.statistics()["invalid_answers"].get(worker.url, 0)
    got = await whole_or_cut(api.ask(trial, session, 4, stream=stream))
    assert got.status == (200 if stream else 502)
    assert said in got.body, got.body
    assert DONE not in got.body
    for internal in (b"Error(", b"sglext", b"NaN", b"1e400"):
        assert internal not in got.body
    assert await trial.records(session) == []
    assert trial.statistics()["invalid_answers"] == {worker.url: before + 1}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", CHATS, ids=str)
async def test_an_invalid_logprob_is_an_error_by_position_and_token(
    trial: SessionTrial, worker: ScriptedWorker, api: Api, stream: bool
) -> None:
    for kind, odd in {**NUMBERS, **LISTS}.items():
        with case(kind):
            worker.always(answered(odd, stream=stream))
            said = b"position 1, token 8" if kind in NUMBERS else b"position 1"
            await is_an_invalid_answer(trial, worker, api, await trial.create(), said, stream=stream)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("odd", MISSING.values(), ids=MISSING)
@pytest.mark.parametrize("api", CHATS, ids=str)
async def test_a_missing_logprob_is_an_error_by_position(
    trial: SessionTrial, worker: ScriptedWorker, api: Api, odd: tuple[Any, Any], stream: bool
) -> None:
    worker.always(answered(odd, stream=stream))
    await is_an_invalid_answer(trial, worker, api, await trial.create(), b"position 1", stream=stream)


async def test_a_worker_whose_answers_are_invalid_is_counted_and_named(
    trial: SessionTrial, worker: ScriptedWorker, caplog: pytest.LogCaptureFixture
) -> None:
    session = await trial.create()
    with caplog.at_level(logging.WARNING):
        for stream in (True, False) * 6:
            worker.next(answered(entry_of(0.5), stream=stream))
            await whole_or_cut(trial.turn(session, [user("Hi")], stream=stream))
    assert trial.statistics()["invalid_answers"] == {worker.url: 12}
    named = [each.__dict__["fields"] for each in caplog.records if each.message == "worker_answers_invalid"]
    assert named == [{"worker": worker.url, "answers": 1}, {"worker": worker.url, "answers": 10}]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", CHATS, ids=str)
async def test_a_number_that_json_has_not_is_an_error(
    trial: SessionTrial, worker: ScriptedWorker, api: Api, stream: bool
) -> None:
    begun, first, second, *end = chat_events(IDS, ["Hel", "lo"])
    for number in (b"NaN", b"-1e400", b"-Infinity"):
        with case(number):
            odd = second.replace(b'"logprob": -0.5', b'"logprob": ' + number)
            whole = reply(json.dumps(chat_answer(IDS)).encode().replace(b"-0.5", number), headers=JSON)
            worker.always(streamed(begun, first, odd, *end) if stream else script(whole))
            await is_an_invalid_answer(trial, worker, api, await trial.create(), b"JSON", stream=stream)


@pytest.mark.parametrize("bad", [b"data: {\n\n", event([delta("lo", logprobs={"content": [{}]})])])
async def test_an_invalid_stream_says_nothing_of_the_next(
    trial: SessionTrial, worker: ScriptedWorker, bad: bytes
) -> None:
    begun, first, second, *end = chat_events(IDS, ["Hel", "lo"])
    worker.next(streamed(begun, first, bad, *end)).always(streamed(begun, first, second, *end))
    session = await trial.create()
    assert DONE not in (await whole_or_cut(trial.turn(session, [user("Hi")], stream=True))).body
    assert (await trial.turn(session, [user("Hi")], stream=True)).body.endswith(DONE)
    assert json.loads(worker.requests[-1].body)["stream"] is True
    assert len(await trial.records(session)) == 1


def completed(number: bytes | None, *, stream: bool) -> Behaviour:
    """A completion whose second token has this logprob; None: it has none."""
    logprobs = b"[-0.5]" if number is None else b"[-0.5, %b]" % number
    choice = {"index": 0, "text": "Hello", "token_ids": IDS, "prompt_token_ids": PROMPT, "finish_reason": "length"}
    raw = json.dumps({"id": "r", "choices": [{**choice, "logprobs": {"token_logprobs": 1}}]}).encode()
    raw = raw.replace(b'"token_logprobs": 1', b'"token_logprobs": ' + logprobs)
    return streamed(b"data: %b\n\n" % raw, DONE) if stream else script(reply(raw, headers=JSON))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_invalid_logprob_of_a_completion_is_an_error(
    trial: SessionTrial, worker: ScriptedWorker, stream: bool
) -> None:
    for number in (b"0.5", b"null", b'"-0.5"', b"false", b"[]", b"NaN", None):
        with case(number):
            worker.always(completed(number, stream=stream))
            said = b"JSON" if number == b"NaN" else b"position 1, token 8"
            api = Api("/v1/completions")
            await is_an_invalid_answer(trial, worker, api, await trial.create(), said, stream=stream)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (b", [0.25, 8]", "position 1, token 8: 0.25 is not a logprob"),
        (b", [false, 8]", "position 1, token 8"),
        (b', ["-0.5", 8]', "position 1, token 8"),
        (b", [null, 8]", "position 1, token 8"),
        (b", null", "position 1: None"),
        (b"", "position 1, token 8 has none"),
        (b", [NaN, 8]", ""),
    ],
)
async def test_a_text_with_invalid_logprobs_flags_its_worker(
    stage: Stage, worker: ScriptedWorker, caplog: pytest.LogCaptureFixture, entry: bytes, said: str, stream: bool
) -> None:
    texts = await trial_before(stage, worker)
    meta = {"id": "r", "finish_reason": {"type": "length", "length": 2}, "output_token_logprobs": "here"}
    raw = json.dumps({"text": "ok", "output_ids": IDS, "meta_info": meta}).encode()
    raw = raw.replace(b'"here"', b"[[-0.5, 7]%b]" % entry)
    worker.always(streamed(b"data: %b\n\n" % raw, DONE) if stream else script(reply(raw, headers=JSON)))
    assert (await texts.post("/generate", {"text": "Hi", "stream": stream})).status == 200, "it is the client's"
    (told,) = [each.__dict__["fields"] for each in caplog.records if each.message == "answer_not_recorded"]
    assert said in told["detail"]
    assert "Error(" not in told["detail"]
    assert texts.statistics()["invalid_answers"] == {worker.url: 1}


@pytest.mark.parametrize("odd", ["no ids", "no logprobs"])
async def test_an_engine_whose_streams_tell_nothing_is_asked_for_whole_answers(
    trial: SessionTrial, worker: ScriptedWorker, odd: str
) -> None:
    if odd == "no ids":
        events = chat_events(IDS, ["Hel", "lo"], input_ids=None, output_ids=None)
    else:
        begun, _, _, *end = chat_events(IDS, ["Hel", "lo"])
        events = [begun, *(event([delta(text, 0)]) for text in ("Hel", "lo")), *end]
    worker.next(streamed(*events)).always(script(reply(json.dumps(chat_answer(IDS)).encode(), headers=JSON)))
    session = await trial.create()
    assert (await trial.turn(session, [user("Hi")], stream=True)).body.endswith(DONE)
    assert (await trial.turn(session, [user("Hi")], stream=True)).body.endswith(DONE)
    assert len(await trial.records(session)) == 1
    assert trial.statistics()["invalid_answers"] == {}


# Counts

USAGE = {"prompt_tokens": len(PROMPT), "completion_tokens": 2, "total_tokens": len(PROMPT) + 2}
ODD: dict[str, dict[str, Any]] = {
    "more reasoning than answer": {"reasoning_tokens": 3, "completion_tokens_details": {"reasoning_tokens": 3}},
    "negative reasoning": {"reasoning_tokens": -1, "completion_tokens_details": {"reasoning_tokens": -1}},
    "more from the cache than prompt": {"prompt_tokens_details": {"cached_tokens": 99}},
    "negative from the cache": {"prompt_tokens_details": {"cached_tokens": -2}},
    "text": {"reasoning_tokens": "2", "prompt_tokens_details": {"cached_tokens": "1"}},
    "a fraction": {"completion_tokens_details": {"reasoning_tokens": 0.5}},
    "a wrong total": {"total_tokens": 7},
    "details that are none": {"completion_tokens_details": [], "prompt_tokens_details": "x"},
    "a truth": {"reasoning_tokens": True, "prompt_tokens_details": {"cached_tokens": True}},
    "nothing": {"completion_tokens_details": None, "prompt_tokens_details": None, "reasoning_tokens": None},
}


def counted(usage: Any, *, stream: bool) -> Behaviour:
    if not stream:
        return script(reply(json.dumps({**chat_answer(IDS), "usage": usage}).encode(), headers=JSON))
    *begun, end = chat_events(IDS, ["Hel", "lo"])
    return streamed(*begun, event([], usage=usage), end)


def numbers(value: Any) -> list[tuple[str, Any]]:
    """All fields below a usage that count tokens."""
    found: list[tuple[str, Any]] = []
    for name, each in value.items() if isinstance(value, dict) else ():
        found += numbers(each) if isinstance(each, dict) else [(name, each)] if name.endswith("tokens") else []
    return found


def usages(api: Api, answers: list[Any]) -> list[Any]:
    """The usage in each answer or event that has one."""
    holders = [each.get("response", each) if api.path == RESPONSES else each.get("message", each) for each in answers]
    return [each["usage"] for each in holders if each.get("usage")]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", [api for api in CHATS if not api.named], ids=str)
async def test_a_count_that_cannot_be_is_not_passed_on(
    trial: SessionTrial, worker: ScriptedWorker, api: Api, stream: bool
) -> None:
    asked: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream and api.path == CHAT else {}
    most = {"cached": len(PROMPT), "reasoning": 2}
    for kind, odd in ODD.items():
        with case(kind):
            worker.always(counted({**USAGE, **odd}, stream=stream))
            got = await api.ask(trial, await trial.create(), 4, stream=stream, **asked)
            last = usages(api, api.answers(got, stream=stream))[-1]
            for name, count in numbers(last):
                assert type(count) is int, (name, last)
                assert 0 <= count <= most.get(name.partition("_")[0], len(PROMPT) + 2), (name, last)
            assert last.get("total_tokens", len(PROMPT) + 2) == len(PROMPT) + 2
    no_objects: tuple[Any, ...] = ("x", [], 5)
    for usage in no_objects:
        with case(usage):
            worker.always(counted(usage, stream=stream))
            session = await trial.create()
            got = await api.ask(trial, session, 4, stream=stream)
            assert all(isinstance(each, dict) for each in usages(api, api.answers(got, stream=stream)))
            assert len(await trial.records(session)) == 1
