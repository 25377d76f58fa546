"""Episodes of sessions that are sampled behind ids, held against what went through the proxy of the engine."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from miles_router.settings.config import MiddlewareSpec
from tests.support.agent_apis import APIS
from tests.support.agents import TOOLS
from tests.support.events import events_of
from tests.support.recording_proxy import RecordingProxy
from tests.support.session_trial import SESSIONS, SessionTrial, is_made_of, tool_result, user
from tests.support.stage import Stage
from tests.support.waiting import until

#: Where SGLang-Jax and vLLM sample behind ids.
GENERATE, VLLM_GENERATE = "/generate", "/inference/v1/generate"
#: SGLang-Jax (cddbf6f) ends an answer at once whose regex has ended one before: no two are the same.
NEW = itertools.count()


def kinds_of_turns() -> Sequence[Mapping[str, Any]]:
    """What each turn of an episode is asked for."""
    call = rf'<tool_call>\n\{{"name": "go", "arguments": \{{"n": "{next(NEW)} [a-z ]{{1,3}}"\}}\}}\n</tool_call>'
    return (
        {"extra_body": {"regex": call}},
        {"extra_body": {"regex": rf"<think>\n{next(NEW)}[a-z ]{{3,8}}\n</think>\n\n[a-z ]{{3,8}}"}},
        {"extra_body": {"regex": rf"[a-z ]{{2,6}}\n{call}\n{call}"}},
        {"max_tokens": 8, "extra_body": {"ignore_eos": True}},
        {"extra_body": {"regex": rf"{next(NEW)} [a-z ]{{3,20}}"}},
    )


def went(proxy: RecordingProxy) -> list[tuple[list[int], list[int], list[float]]]:
    """Prompt, ids and logprobs of every generation that was answered, by the last thing that was said of each."""
    found = []
    for exchange in proxy.exchanges:
        if exchange.path == GENERATE and exchange.status == 200:
            asked, reply = orjson.loads(exchange.body), exchange.reply
            said = events_of(reply)[-1] if asked.get("stream") else orjson.loads(reply)
            for answer in said if isinstance(said, list) else [said]:
                entries = answer["meta_info"]["output_token_logprobs"]
                found.append((asked["input_ids"], [each[1] for each in entries], [each[0] for each in entries]))
        if exchange.path == VLLM_GENERATE and exchange.status == 200:
            asked, reply = orjson.loads(exchange.body), exchange.reply
            told = events_of(reply) if asked.get("stream") else [orjson.loads(reply)]
            choices = [choice for each in told for choice in each["choices"]]
            ids = [token for choice in choices for token in choice["token_ids"]]
            logprobs = [each["logprob"] for choice in choices for each in choice["logprobs"]["content"]]
            found.append((asked["token_ids"], ids, logprobs))
    return found


async def five_turns(stage: Stage, proxy: RecordingProxy, checkpoint: str, api: str, *, stream: bool) -> None:
    """See that five turns with tools are what the engine behind the proxy was given and has sampled."""
    router = await stage.router(proxy.url, middlewares=(MiddlewareSpec(SESSIONS, {}),), hf_checkpoint=checkpoint)
    await until(lambda: router.pool.routable, "the worker has answered")
    trial = SessionTrial(router, ())
    agent = APIS[api](f"{router.url}/sessions/{await trial.create('s')}")
    history: list[Any] = [{"role": "system", "content": "You go."}, user("Go 3 steps.")]
    try:
        for place, kind in enumerate(kinds_of_turns()):
            asked = {"model": "m", "messages": history, "max_tokens": 200, "tools": TOOLS, "extra_headers": {}, **kind}
            (answer,) = await agent.answers(asked, stream=stream)
            calls = answer.get("tool_calls") or []
            assert len(calls) == {0: 1, 2: 2}.get(place, 0), [
                (each["finish_reason"], each["response"]) for each in await trial.records("s")
            ]
            results = [tool_result(call, f"done {place}") for call in calls]
            history += [answer, *(results or [user(f"And {place}?")])]
    finally:
        await agent.close()
    records = await trial.records("s")
    assert [record["reason"] for record in records] == [None] * 5
    assert [record["finish_reason"] for record in records] == ["tool_calls", "stop", "tool_calls", "length", "stop"]
    assert not (await trial.read("s"))["metadata"]["untraced"]
    (sample,) = await trial.samples("s")
    is_made_of(sample, went(proxy))
    assert {exchange.path for exchange in proxy.exchanges if b"messages" in exchange.body} == set()
