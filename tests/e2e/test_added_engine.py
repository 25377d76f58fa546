"""An engine that is added by one folder and a name in one line, as the page about engines shows it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

import miles_router
from tests.docs.pages import ROOT, blocks
from tests.support.http import RawReply, ask
from tests.support.running_router import command, router_process
from tests.support.scripted_worker import ScriptedWorker, Visit, reply, script
from tests.support.tokenizers import tokenizer_directory
from tests.support.under_way import under_way
from tests.support.waiting import until

pytestmark = pytest.mark.alone("it starts routers of its own")
LAYER = "middleware_hub.openai_session_middleware.OpenAISessionMiddleware"
SESSIONS = ("--middleware-paths", LAYER, "--hf-checkpoint", tokenizer_directory("qwen3"))
JSON = [("Content-Type", "application/json")]
SAID = {"name": "r", "text": "xy", "tokens": [7, 8], "logs": [-0.5, -0.25], "end": "length"}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The router's package with the engine of the page."""
    folder = tmp_path_factory.mktemp("added")
    for name in (miles_router.__name__, "middleware_hub"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    engines = folder / "miles_router" / "engines"
    (shown,) = blocks(ROOT / "docs" / "engines.md", "python")
    (engines / "toy").mkdir()
    (engines / "toy" / "__init__.py").touch()
    (engines / "toy" / "engine.py").write_text(shown.text, encoding="utf-8")
    known = (engines / "known.py").read_text(encoding="utf-8")
    listed = "KINDS: Sequence[type[Engine]] = ("
    assert f"{listed}Toy, SGLangJax, SGLang, VLLM)" in (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    assert f"{listed}SGLangJax, SGLang, VLLM)" in known
    imported = "from miles_router.engines.toy.engine import Toy\n"
    before = "from miles_router.engines.sglang.engine"
    known = known.replace(listed, f"{listed}Toy, ").replace(before, imported + before)
    (engines / "known.py").write_text(known, encoding="utf-8")
    return folder


@asynccontextmanager
async def toy() -> AsyncIterator[ScriptedWorker]:
    """A worker of that engine."""

    async def behave(visit: Visit) -> None:
        if visit.request.path == "/toy/sample":
            await script(reply(orjson.dumps(SAID), headers=JSON))(visit)
        elif visit.request.path.startswith("/toy/"):
            await script(reply(b'{"toy": true}', headers=JSON))(visit)
        else:
            await script(reply(b"{}", 404))(visit)

    async with ScriptedWorker() as worker:
        worker.model_info = worker.health = script(reply(b"{}", 404))
        worker.standing["/toy/about"] = script(reply(b'{"engine": "toy"}', headers=JSON))
        yield worker.always(behave)


async def post(router: str, path: str, **fields: Any) -> RawReply:
    return await ask(router, "POST", path, JSON, orjson.dumps(fields))


def told(worker: ScriptedWorker) -> list[tuple[str, Any]]:
    asked = [(each.target.decode(), orjson.loads(each.body or b"null")) for each in worker.requests]
    return [each for each in asked if each[0] != "/toy/about"]


@asynccontextmanager
async def behind_a_router(package: Path, *workers: ScriptedWorker | str) -> AsyncIterator[str]:
    """Workers, and more of the command line."""
    urls = [worker.url for worker in workers if isinstance(worker, ScriptedWorker)]
    more = [each for each in workers if isinstance(each, str)]
    start = command("env", f"PYTHONPATH={package}")
    async with router_process("--worker-urls", *urls, *more, start=start) as router:
        yield router.url


async def test_its_paths_are_asked_and_its_answers_are_those_of_generate(package: Path) -> None:
    async with toy() as worker, behind_a_router(package, worker) as url:
        answer = await post(url, "/generate", text="Hi", rid="r", sampling_params={"max_new_tokens": 2})
        assert (answer.status, answer.json()["output_ids"]) == (200, [7, 8])
        assert answer.json()["meta_info"]["id"] == "r"
        assert told(worker) == [("/toy/sample", {"prompt": "Hi", "name": "r", "max_new_tokens": 2})]
        for path in ("/generate", "/v1/chat/completions"):
            refused = await post(url, path, text="Hi", messages=[], stream=True)
            assert (refused.status, refused.error_type) == (501, "unsupported_by_engine")
        assert len(told(worker)) == 1
        worker.requests.clear()
        aborted = asyncio.Event()
        worker.next(script(aborted, reply(orjson.dumps({**SAID, "end": "abort"}), headers=JSON)))
        async with under_way(post(url, "/generate", text="Hi", rid="r")) as asked:
            await until(lambda: bool(worker.requests), "it samples")
            assert (await post(url, "/abort_request", rid="r")).status == 200
            assert told(worker)[-1] == ("/toy/end", {"names": ["r"]})
            aborted.set()
            assert (await asked).json()["meta_info"]["finish_reason"] == {"type": "abort"}


async def test_a_session_on_it_is_sampled_behind_ids(package: Path) -> None:
    async with toy() as worker, behind_a_router(package, worker, *SESSIONS) as url:
        session = (await post(url, "/sessions")).json()["session_id"]
        history: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
        for _ in range(2):
            answer = await post(url, f"/sessions/{session}/v1/chat/completions", messages=history, max_tokens=2)
            assert answer.status == 200, answer.body
            history += [answer.json()["choices"][0]["message"], {"role": "user", "content": "And?"}]
        first, second = (asked["prompt"] for _, asked in told(worker))
        assert second[: len(first) + 2] == [*first, 7, 8]
        (sample,) = (await post(url, f"/sessions/{session}/samples", format="json")).json()["samples"]
        assert (sample["tokens"], sum(sample["loss_mask"])) == ([*second, 7, 8], 4)
        assert sample["logprobs"][-2:] == [-0.5, -0.25]


async def test_control_requests_in_any_spelling_reach_it_in_its_own(package: Path) -> None:
    async with toy() as worker, behind_a_router(package, worker) as url:
        cases: list[tuple[str, dict[str, Any], Any]] = [
            ("/pause_generation", {"mode": "abort"}, ("/toy/pause?how=drop", {})),
            ("/continue_generation", {}, ("/toy/go", {})),
            ("/flush_cache", {}, ("/toy/forget", {})),
            ("/abort_request", {"rid": "r"}, ("/toy/end", {"names": ["r"]})),
            ("/abort_request", {"abort_all": True}, ("/toy/end", {})),
        ]
        for path, fields, own in cases:
            answer = await post(url, path, **fields)
            assert (answer.status, answer.json(), told(worker)) == (200, {"status": "ok"}, [own]), path
            worker.requests.clear()
        # In its own spelling
        answer = await post(url, "/toy/pause?how=keep", why="a test")
        assert (answer.status, answer.json()) == (200, {"toy": True})
        assert told(worker) == [("/toy/pause?how=keep", {"why": "a test"})]
        info = (await ask(url, "GET", "/router/info")).json()
        assert (info["gate"]["mode"], info["gate"]["closed"]) == ("in_place", True)
        assert (await post(url, "/toy/pause?how=so")).error_type == "invalid_request"
        assert (await post(url, "/toy/go")).status == 200
        assert (await post(url, "/generate", text="Hi")).status == 200


async def test_workers_of_several_kinds_are_each_told_in_their_own_words(package: Path) -> None:
    async with toy() as worker, ScriptedWorker() as other, behind_a_router(package, worker, other) as url:
        for path in ("/update_weights_from_disk", "/freeze_gc"):
            answer = await post(url, path, model_path="m")
            assert (answer.status, answer.error_type) == (501, "unsupported_by_engine"), path
        assert (told(worker), told(other)) == ([], [])
        assert (await post(url, "/pause_generation", mode="retract")).status == 200
        assert (await post(url, "/toy/go", a=1)).status == 200
        assert told(worker) == [("/toy/pause?how=keep", {}), ("/toy/go", {"a": 1})]
        assert told(other) == [("/pause_generation", {"mode": "retract"}), ("/continue_generation", {})]
