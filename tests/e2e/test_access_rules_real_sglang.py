"""Access rules in front of a real SGLang: no spelling of a control path is carried out with the client key, and no
spelling of a generation passes a closed gate."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from miles_router.engines import paths
from miles_router.engines.known import CONTROL, GENERATION
from miles_router.settings.config import MiddlewareSpec
from tests.sglang.environment import ensure
from tests.sglang_worker import RealWorker
from tests.support.http import Pairs, ask
from tests.support.running_router import RunningRouter, running_router
from tests.support.session_trial import SESSIONS
from tests.support.spellings import spellings

pytestmark = pytest.mark.sglang

JSON = ("Content-Type", "application/json")
DATA: Pairs = [("Authorization", "Bearer data"), JSON]
ADMIN: Pairs = [("Authorization", "Bearer admin"), JSON]
BODY = b'{"text": "Hi", "rid": "", "abort_all": true, "mode": "abort", "new_version": "theirs", "model_path": "/no"}'
#: Of APIs that a session refuses unknown fields of.
BODIES = {
    paths.MESSAGES: b'{"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}',
    paths.RESPONSES: b'{"model": "m", "max_output_tokens": 1, "input": "Hi"}',
}
#: What the router itself says; a worker's own refusal would mean that it was asked.
REFUSED = ((400, "invalid_request"), (401, "unauthorized"), (404, "not_found"))
#: The same in the words of any API, which name the router's own type too.
HELD = (*REFUSED, (503, "unavailable"))


@pytest.fixture
async def router(sglang_workers: list[RealWorker]) -> AsyncIterator[RunningRouter]:
    """A router with a session `s`, and one that holds nobody at its gate."""
    urls = [worker.url for worker in sglang_workers]
    keys = {"api_key": "data", "admin_api_key": "admin"}
    specs = (MiddlewareSpec(SESSIONS),)
    async with running_router(
        *urls, middlewares=specs, hf_checkpoint=str(ensure().dense_model), gate_max_held=0, **keys
    ) as running:
        await running.probed()
        assert (await running.ask("POST", "/sessions", DATA, b'{"session_id": "s"}')).status == 200
        yield running


def ways(path: str) -> Iterator[str]:
    for way in dict.fromkeys(spellings(path)):
        yield from (way, f"/sessions/s{way}")


async def facts(workers: list[RealWorker]) -> list[object]:
    """What a control request would have changed."""
    return [(await ask(worker.url, "GET", "/model_info")).json() for worker in workers]


async def test_no_spelling_of_a_control_path_is_carried_out(
    router: RunningRouter, sglang_workers: list[RealWorker]
) -> None:
    before = await facts(sglang_workers)
    for row in CONTROL.values():
        for target in ways(row.path):
            for method in row.methods:
                answer = await router.ask(method, target, DATA, BODY)
                assert (answer.status, answer.error_type) in REFUSED, target
    assert await facts(sglang_workers) == before
    for worker in sglang_workers:
        asked = b'{"text": "Hi", "sampling_params": {"max_new_tokens": 2}}'
        answer = await ask(worker.url, "POST", "/generate", [JSON], asked)
        assert answer.json()["meta_info"]["finish_reason"]["type"] in ("length", "stop")


async def test_no_spelling_of_a_generation_passes_a_closed_gate(router: RunningRouter) -> None:
    assert (await router.ask("POST", "/pause_generation", ADMIN, b'{"mode": "abort"}')).status == 200
    try:
        for path in sorted(GENERATION):
            for target in ways(path):
                answer = await router.ask("POST", target, DATA, BODIES.get(path, BODY))
                said = (b'"%b"' % word.encode() in answer.body for status, word in HELD if status == answer.status)
                assert any(said), (target, answer.body)
    finally:
        assert (await router.ask("POST", "/continue_generation", ADMIN, b"{}")).status == 200
