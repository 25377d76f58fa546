"""The middlewares of docs/writing-a-middleware.md, taken from the page and run in a router."""

from __future__ import annotations

import importlib
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from miles_router.check import check_path, stage
from miles_router.middlewares.router import Router
from miles_router.settings.config import MiddlewareSpec, RouterConfig
from miles_router.testing import SimulatedWorker
from tests.docs.pages import ROOT, blocks
from tests.support.http import RawReply
from tests.support.running_router import RunningRouter, running_router

JSON = [("content-type", "application/json")]
PAGE = ROOT / "docs" / "writing-a-middleware.md"
SHOWN = {block.file_name: block.text for block in blocks(PAGE, "python") if block.file_name}
CLASSES = [
    "token_cap.TokenCap",
    "finish_count.FinishCount",
    "reply_size.ReplySize",
    "stream_times.StreamTimes",
    "ask_again.AskAgain",
    "probe.Probe",
    "legacy.Legacy",
]


@pytest.fixture(autouse=True)
def shown_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The files of the page, importable from the current directory, as its reader has them."""
    for name, text in SHOWN.items():
        (tmp_path / str(name)).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in SHOWN:
        sys.modules.pop(str(name).removesuffix(".py"), None)


@asynccontextmanager
async def serving(*paths: str, **options: Any) -> AsyncIterator[tuple[RunningRouter, SimulatedWorker]]:
    """A router with this stack in front of one worker; `options` are those of the first class."""
    specs = [MiddlewareSpec(path) for path in paths]
    specs[0] = MiddlewareSpec(paths[0], options)
    async with (
        SimulatedWorker(stop_probability=0) as worker,
        running_router(worker.url, middlewares=tuple(specs)) as router,
    ):
        yield router, worker


async def generate(router: RunningRouter, **sampling_params: Any) -> RawReply:
    body = orjson.dumps({"text": "Hi", "sampling_params": sampling_params})
    return await router.ask("POST", "/generate", JSON, body)


@pytest.mark.parametrize("path", CLASSES)
def test_every_class_keeps_the_contract(path: str) -> None:
    verdicts = list(check_path(path, RouterConfig()))
    assert verdicts
    assert [verdict for verdict in verdicts if verdict[1]] == []


def test_a_middleware_that_reads_answers_and_streams_is_25_lines_of_code() -> None:
    assert len([line for line in SHOWN["finish_count.py"].splitlines() if line.strip()]) <= 25


async def test_the_page_s_own_test_passes_and_can_fail() -> None:
    shown: Any = importlib.import_module("test_finish_count")
    await shown.test_every_end_is_counted_once()
    shown.FinishCount.__call__ = _blind
    with pytest.raises(AssertionError):
        await shown.test_every_end_is_counted_once()


async def _blind(self: Any, scope: Scope, receive: Receive, send: Send) -> None:
    await self.app(scope, receive, send)


async def test_token_cap_cuts_what_is_over_its_limit_and_leaves_the_rest_byte_for_byte() -> None:
    async with serving("token_cap.TokenCap", limit=3) as (router, worker):
        reply = await generate(router, max_new_tokens=9)
        assert reply.json()["meta_info"]["completion_tokens"] == 3
        assert worker.log.at("/generate")[-1].json()["sampling_params"] == {"max_new_tokens": 3}
        assert (await router.ask("GET", "/token_cap")).json() == {"limit": 3}
        within = b'{"text":  "Hi",\n"sampling_params": {"max_new_tokens": 3}}'
        await router.ask("POST", "/generate", JSON, within)
        assert worker.log.at("/generate")[-1].body == within
        body = {"text": ["a", "b"], "sampling_params": [{"max_new_tokens": 9}, {"max_new_tokens": 2}]}
        assert (await router.ask("POST", "/generate", JSON, orjson.dumps(body))).status == 200
        sent = worker.log.at("/generate")[-1].json()["sampling_params"]
        assert sent == [{"max_new_tokens": 3}, {"max_new_tokens": 2}]
        for tokens in (9, None):
            assert (await generate(router, max_new_tokens=tokens, n=2)).status == 200
            assert worker.log.at("/generate")[-1].json()["sampling_params"] == {"max_new_tokens": 3, "n": 2}
        assert (await router.ask("POST", "/generate", JSON, b'{"text": 7}')).status == 400


async def test_ask_again_hides_one_failure_and_no_second() -> None:
    async with serving("ask_again.AskAgain") as (router, worker):
        worker.faults.status(500, path="/generate")
        assert (await generate(router, max_new_tokens=2)).status == 200
        assert [exchange.status for exchange in worker.log.at("/generate")] == [500, 200]
        worker.faults.status(500, path="/generate", times=2)
        assert (await generate(router, max_new_tokens=2)).status == 500


async def test_probe_asks_a_worker_by_itself() -> None:
    async with serving("probe.Probe") as (router, worker):
        assert (await router.ask("GET", "/probe")).json() == {"worker": worker.url, "tokens": 1}
        assert router.pool.in_flight == 0


async def test_reply_size_writes_while_the_router_runs(tmp_path: Path) -> None:
    async with serving("reply_size.ReplySize", file="sizes.txt") as (router, _):
        reply = await generate(router, max_new_tokens=2)
    assert (tmp_path / "sizes.txt").read_text() == f"/generate {len(reply.body)}\n"


async def test_stream_times_are_told_in_front_of_the_last_event() -> None:
    async with stage("stream_times.StreamTimes") as at:
        reply = await at.generate("Hi", stream=True)
        *answers, times = reply.events()
        assert [answer["meta_info"]["completion_tokens"] for answer in answers] == list(range(1, 9))
        assert b"event: times\n" in reply.body
        assert reply.body.endswith(b"data: [DONE]\n\n")
        numbers = at.router.statistics["stream_times"]()
        assert numbers["first_event"] == {"count": 1, "sum": times["first_event_s"]}


async def test_all_of_them_run_in_one_stack() -> None:
    async with serving(*CLASSES, limit=2) as (router, worker):
        reply = await generate(router, max_new_tokens=9)
        assert reply.json()["meta_info"]["completion_tokens"] == 2
        assert reply.value("x-legacy") == b"seen"
        assert [layer for layer in vars(router.app.router) if layer == "legacy"] == ["legacy"]
        assert len(worker.log.at("/generate")) == 1


class AnnouncedLength:
    """Stands inside TokenCap and notes the length that the scope announces, as a layer that trusts it would."""

    def __init__(self, app: ASGIApp, *, router: Router) -> None:
        self._app, self._state = app, router.state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._state.announced = int(dict(scope["headers"])[b"content-length"])
        await self._app(scope, receive, send)


async def test_the_layers_inside_token_cap_are_told_the_new_length() -> None:
    async with serving("token_cap.TokenCap", f"{__name__}.AnnouncedLength", limit=3) as (router, worker):
        await generate(router, max_new_tokens=100_000)
        assert router.app.router.state.announced == len(worker.log.at("/generate")[-1].body)
