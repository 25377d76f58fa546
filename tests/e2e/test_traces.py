"""Traces over real sockets: what a collector that speaks OTLP/HTTP is told of turns, and what engines are told."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from middleware_hub.traces import provider
from miles_router.app import create_app
from miles_router.errors import ConfigError
from miles_router.settings.config import DASHBOARD, TRACES, MiddlewareSpec, RouterConfig
from miles_router.testing import SimulatedWorker
from tests.e2e import test_trained_models as trained
from tests.support.cache_trial import CACHE, JSON, SHORT, Trial, checkpoint
from tests.support.collector import CollectedSpan, Collector
from tests.support.fleet import gate, held, posting
from tests.support.http import RawReply, ask
from tests.support.metrics import metrics, samples
from tests.support.running_router import RunningRouter, router_process, running_router
from tests.support.scripted_worker import RESET, ScriptedWorker, reply, script
from tests.support.session_trial import SessionTrial, simulated_sessions, user
from tests.support.stage import Stage
from tests.support.waiting import until

#: The example of W3C Trace Context.
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
#: The flag of OTLP for spans whose parent is another process's.
REMOTE = 0x200
SECRET = "a prompt that nobody else may see"
BODY = json.dumps({"text": SECRET, "sampling_params": {"max_new_tokens": 4}}).encode()
ON: dict[str, Any] = {"otel": True}


@pytest.fixture
async def collector(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Collector:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    return Collector(await stage.worker(), monkeypatch)


async def generate(router: RunningRouter, *headers: tuple[str, str], path: str = "/generate") -> RawReply:
    return await router.ask("POST", path, [*JSON, *headers], BODY)


def within(part: CollectedSpan, whole: CollectedSpan) -> bool:
    return whole.start <= part.start <= part.end <= whole.end


def told(worker: ScriptedWorker, name: str) -> list[bytes]:
    """The values of a header that the engine was told."""
    return [value for each in worker.requests for value in each.values(name)]


def parents(worker: ScriptedWorker) -> list[tuple[str, str, bool]]:
    """The spans that the engine was told, each with its trace and whether it is kept."""
    parts = [value.decode().split("-") for value in told(worker, "traceparent")]
    return [(trace, span, bool(int(flags, 16) & 1)) for _, trace, span, flags in parts]


# One turn


async def test_a_request_without_a_session_is_a_trace_of_its_own(stage: Stage, collector: Collector) -> None:
    worker, router = await stage.worker_and_router(**ON)
    for _ in range(2):
        assert (await generate(router, ("X-Request-Id", "mine"))).status == 200
    first, second = await collector.come("turn", 2)
    assert (first.parent, first.trace == second.trace, first.kind) == ("", False, 2)
    assert first.attributes == {
        "miles_router.route": "generate",
        "miles_router.mode": "passthrough",
        "miles_router.request_id": "mine",
        "miles_router.worker": worker.url,
        "miles_router.weight_version": "1",
        "http.response.status_code": 200,
    }
    assert not first.failed
    assert first.start <= first.first_byte <= first.end
    assert collector.parts(first) == [], "what comes behind the first byte is the generation"


async def test_a_clients_own_span_is_what_the_turn_is_part_of(stage: Stage, collector: Collector) -> None:
    worker, router = await stage.worker_and_router(**ON)
    await generate(router, ("traceparent", f"00-{TRACE}-{SPAN}-01"), ("tracestate", "a=1"), ("X-Session-Id", "s"))
    (turn,) = await collector.come("turn", 1)
    assert (turn.trace, turn.parent, turn.flags & REMOTE) == (TRACE, SPAN, REMOTE)
    assert parents(worker) == [(TRACE, turn.id, True)]
    assert told(worker, "tracestate") == [b"a=1"]


async def test_a_span_that_is_none_is_no_parent(stage: Stage, collector: Collector) -> None:
    worker, router = await stage.worker_and_router(**ON)
    short, upper = f"00-{TRACE}-{SPAN}", f"00-{TRACE.upper()}-{SPAN}-01"
    odd = [[short], [f"ff-{TRACE}-{SPAN}-01"], [f"{short}-01-more"], [f"00-{'0' * 32}-{SPAN}-01"], [upper]]
    odd += [[f"{short}-01"] * 2, ["x" * 4000]]
    for headers in odd:
        await generate(router, *(("traceparent", each) for each in headers), ("tracestate", "a=1"))
    turns = await collector.come("turn", len(odd))
    for turn in turns:
        assert (turn.parent, turn.trace == TRACE, turn.flags & REMOTE) == ("", False, 0)
    assert {*parents(worker)} == {(turn.trace, turn.id, True) for turn in turns}
    assert told(worker, "tracestate") == []


async def test_what_fails_says_why(stage: Stage, collector: Collector) -> None:
    worker = (await stage.worker()).always(script(RESET))
    router = await stage.router(worker, **ON)
    assert (await generate(router)).status == 502
    (turn,) = await collector.come("turn", 1)
    assert turn.failed
    assert (turn.attributes["error.type"], turn.attributes["http.response.status_code"]) == (
        "upstream_unreachable",
        502,
    )
    (head,) = collector.parts(turn)
    assert (head.name, head.attributes["miles_router.worker"]) == ("first_byte", worker.url)


async def test_only_what_generates_is_traced(stage: Stage, collector: Collector) -> None:
    worker, router = await stage.worker_and_router(**ON)
    await router.ask("GET", "/v1/models", [("traceparent", f"00-{TRACE}-{SPAN}-01")])
    await generate(router)
    await collector.come("turn", 1)
    assert len(collector.spans("turn")) == 1
    assert told(worker, "traceparent")[0] == f"00-{TRACE}-{SPAN}-01".encode(), "as it came"


# Waits


async def test_a_wait_at_the_gate_is_a_span(stage: Stage, collector: Collector) -> None:
    router = await stage.router(await stage.worker(), **ON)
    gate(router).pause("retract")
    waiting = posting(router)
    await held(router, 1)
    gate(router).resume()
    assert (await waiting).status == 200
    (turn,) = await collector.come("turn", 1)
    assert [part.name for part in collector.parts(turn)] == ["gate", "first_byte", "generation"]


# Episodes


async def test_a_session_is_one_trace(stage: Stage, collector: Collector) -> None:
    async with simulated_sessions(stage, settings=ON) as trial:
        session = await trial.create()
        first = await trial.chat(session, [user(SECRET)])
        messages = [user(SECRET), first["choices"][0]["message"], user("And now?")]
        await trial.chat(session, messages)
        turns = await collector.come("turn", 2)
        assert collector.spans("episode") == [], "it is not over"
        assert (await trial.ask("DELETE", f"/sessions/{session}")).status == 204
        (episode,) = await collector.come("episode", 1)
        check_turns(trial, session, turns, collector)
    assert {turn.trace for turn in turns} == {episode.trace}
    assert {turn.parent for turn in turns} == {episode.id}
    assert (episode.parent, episode.attributes) == ("", {"session.id": session, "miles_router.turns": 2})
    assert episode.start <= turns[0].start <= turns[1].end <= episode.end
    assert len(collector.spans("episode")) == 1


async def test_sessions_of_two_models_are_two_traces_and_each_ends_with_its_own(collector: Collector) -> None:
    async with trained.scene(otel=True) as made:
        for trial in (made.solver, made.coder):
            await trial.create("same")
            await trial.chat("same", [user(SECRET)])
        turns = await collector.come("turn", 2)
        assert len({turn.trace for turn in turns}) == 2
        for ended, trial in enumerate((made.coder, made.solver), 1):
            assert (await trial.ask("DELETE", "/sessions/same")).status == 204
            await collector.come("episode", ended)
        episodes = collector.spans("episode")
    assert [each.trace for each in episodes] == [turn.trace for turn in reversed(turns)]
    assert [each.attributes["session.id"] for each in episodes] == ["same", "same"]


def check_turns(trial: SessionTrial, session: str, turns: list[CollectedSpan], collector: Collector) -> None:
    """What turns say is what the worker was given and has sampled."""
    for turn, visit in zip(turns, trial.log, strict=True):
        (generation,) = visit.generations
        assert turn.attributes == {
            **turn.attributes,
            "session.id": session,
            "miles_router.mode": "session",
            "miles_router.route": "chat_completions",
            "miles_router.weight_version": "1",
            "gen_ai.usage.input_tokens": len(generation.input_ids),
            "gen_ai.usage.output_tokens": len(generation.output_ids),
            "gen_ai.response.finish_reasons": ["length"],
        }
        parts = collector.parts(turn)
        assert [part.name for part in parts] == ["prepare", "first_byte", "generation", "parsing"]
        assert all(within(part, turn) for part in parts)
        assert [part.end for part in parts[:-1]] <= [part.start for part in parts[1:]], "one behind the other"


async def test_a_text_that_goes_on_stays_in_its_trace(stage: Stage, collector: Collector) -> None:
    async with SimulatedWorker(tokenizer=checkpoint()) as worker:
        layers = (MiddlewareSpec(CACHE),)
        trial = Trial(await stage.router(worker.url, middlewares=layers, hf_checkpoint=checkpoint(), **ON), worker)
        text = SECRET
        for _ in range(3):
            text += (await trial.generate(text=text))["text"] + "\nAnd?"
        await trial.generate(text=SECRET)  # another rollout of the same prompt
        turns = await collector.come("turn", 4)
        given = [each.generations[0].input_ids for each in trial.log]
    assert [turn.trace == turns[0].trace for turn in turns] == [True, True, True, False]
    assert [turn.parent for turn in turns] == ["", turns[0].id, turns[0].id, ""]
    assert [turn.attributes["gen_ai.usage.input_tokens"] for turn in turns] == [len(ids) for ids in given]
    assert {turn.attributes["miles_router.mode"] for turn in turns} == {"text"}
    assert {turn.attributes["gen_ai.usage.output_tokens"] for turn in turns} == {SHORT["max_new_tokens"]}


# Settings of OpenTelemetry


async def test_the_sampler_keeps_whole_sessions(
    stage: Stage, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    worker, router = await stage.worker_and_router(**ON)
    for number in range(64):
        for _ in range(2):
            await generate(router, ("X-Session-Id", f"s{number}"))
    kept = [each for *_, each in parents(worker)]
    assert kept[::2] == kept[1::2]
    await collector.come("turn", sum(kept))
    assert len(collector.spans("turn")) == sum(kept)
    assert 0 < sum(kept) < 128, "of 64 sessions, whose names are always the same"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "no exporter 'otlp_proto_grpc' is installed"),
        ("OTEL_TRACES_EXPORTER", "absent", "no exporter 'absent' is installed"),
    ],
)
async def test_an_exporter_that_cannot_be_made_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        create_app(RouterConfig(otel=True))


async def test_the_shorthand_lists_the_middleware_first_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    other, traces, last = MiddlewareSpec(CACHE), MiddlewareSpec(TRACES), MiddlewareSpec(DASHBOARD)
    assert RouterConfig(otel=True, middlewares=(other,)).chain == (traces, other, last)
    assert RouterConfig(otel=True, middlewares=(other, traces)).chain == (other, traces, last)
    assert RouterConfig(middlewares=(other,)).chain == (other, last)


@pytest.mark.parametrize(("name", "value"), [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")])
async def test_the_environment_can_switch_traces_off(
    stage: Stage, collector: Collector, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    worker, router = await stage.worker_and_router(**ON)
    await generate(router, ("traceparent", f"00-{TRACE}-{SPAN}-01"))
    assert told(worker, "traceparent") == [f"00-{TRACE}-{SPAN}-01".encode()]


# In nobody's way


async def counts(router: RunningRouter, ended: int, sent: int, failed: int) -> None:
    """Wait until so many spans have ended, were sent, and were not taken."""
    numbers = router.app.router.statistics["traces"]
    wanted = {"sent": sent, "failed": failed}
    await until(lambda: numbers()["exported_spans"] == {name: n for name, n in wanted.items() if n}, "the spans")
    (shown,) = samples(await metrics(router.url), "miles_router_trace_ended_spans_total")
    assert shown.value == ended


@pytest.mark.alone("each process has an exporter of its own")
async def test_a_collector_that_refuses_is_in_nobodys_way(stage: Stage, collector: Collector) -> None:
    collector.server.always(script(reply(status=400)))
    router = await stage.router(await stage.worker(), **ON)
    assert (await generate(router)).status == 200
    await counts(router, 1, 0, 1)
    collector.server.always(script(reply()))
    assert (await generate(router)).status == 200
    await counts(router, 2, 1, 1)


@pytest.mark.alone("each process has an exporter of its own")
async def test_requests_do_not_wait_for_a_collector_that_is_silent(
    stage: Stage, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "2")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    release = asyncio.Event()
    collector.server.always(script(release, reply()))
    router = await stage.router(await stage.worker(), **ON)
    assert (await generate(router)).status == 200
    await until(lambda: collector.requests, "the first span is on its way")
    for _ in range(4):
        assert (await generate(router)).status == 200
    await counts(router, 5, 0, 0)
    release.set()
    await counts(router, 5, 3, 0)  # two of the four found room


async def test_the_end_of_the_router_does_not_wait_for_a_collector_that_is_silent(
    stage: Stage, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider, "LAST_SECONDS", 0.05)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
    release = asyncio.Event()
    collector.server.always(script(release, reply()))
    async with running_router(await stage.worker(), **ON) as router:
        assert (await generate(router)).status == 200
        await until(lambda: collector.requests, "the span is on its way")
    assert not release.is_set()
    release.set()


async def test_the_end_of_the_router_sends_what_waits(
    collector: Collector, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    worker = await stage.worker()
    async with router_process("--otel", "true", "--worker-urls", worker.url) as running:
        assert (await ask(running.url, "POST", "/generate", [*JSON, ("X-Session-Id", "s")], BODY)).status == 200
        assert collector.requests == []
    assert [span.name for span in collector.spans()] == ["turn", "episode"]


async def test_no_text_and_no_key_is_told(stage: Stage, collector: Collector) -> None:
    router = await stage.router(await stage.worker(), api_key="the-secret-key", **ON)
    answer = await generate(router, ("Authorization", "Bearer the-secret-key"))
    assert answer.status == 200
    await collector.come("turn", 1)
    for each in collector.requests:
        assert SECRET.encode() not in each.body
        assert b"the-secret-key" not in each.body


async def test_without_the_setting_nothing_of_it_is_loaded() -> None:
    code = (
        "import sys; from miles_router import create_app; from miles_router.forwarding.proxy import Proxy; "
        "app = create_app(); assert type(app.pools.default.app) is Proxy; "
        "assert not [name for name in sys.modules if name.startswith(('opentelemetry', 'middleware_hub.traces'))]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)  # noqa: ASYNC221
    assert (done.returncode, done.stderr) == (0, "")
