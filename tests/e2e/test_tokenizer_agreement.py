"""Nothing is traced with a tokenizer that is not the engine's, and no wrongly loaded one is taken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from miles_router.errors import ConfigError
from miles_router.middlewares.checkpoint import load_tokenizer
from miles_router.settings.config import RouterConfig
from miles_router.testing import SimulatedWorker
from tests.support.bare_calls import MESSAGES, RESPONSES, request
from tests.support.cache_trial import checkpoint, trial_before
from tests.support.fleet import post
from tests.support.session_trial import CHAT, SessionTrial, qwen3, session_trial, user
from tests.support.stage import Stage
from tests.support.tokenizers import tokenizer_directory

HI = [user("Hi")]
TEXT = {"text": "Hi", "sampling_params": {"max_new_tokens": 2}}


async def ask(trial: SessionTrial, path: str, *, stream: bool = False) -> Any:
    session = await trial.create()
    reply = await trial.ask("POST", f"/sessions/{session}{path}", request(path, HI, stream=stream))
    return reply, (await trial.read(session))["records"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_session_is_refused_where_engines_tokenize_otherwise(stage: Stage, path: str, *, stream: bool) -> None:
    async with SimulatedWorker(tokenizer=checkpoint()) as worker:
        trial = await session_trial(stage, worker)
        reply, records = await ask(trial, path, stream=stream)
        assert (reply.status, records) == (502, [])
        assert f"{worker.url} tokenizes" in reply.body.decode()
        assert not trial.door
        await stage.provoked("tokenizer_differs")


async def test_text_cache_is_refused_where_the_engine_tokenizes_otherwise(stage: Stage) -> None:
    async with SimulatedWorker(tokenizer=qwen3()) as worker:
        trial = await trial_before(stage, worker)
        reply = await trial.post("/generate", TEXT)
        assert (reply.status, reply.json()["error"]["type"]) == (502, "tokenizer_differs")
        assert "--trust-remote-tokenizer" in reply.json()["error"]["message"]
        assert not trial.door
        passed = await trial.post("/generate", {**TEXT, "image_data": "x.png"})
        assert passed.status != 502, "what is not traced passes"
        await stage.provoked("tokenizer_differs")


async def test_worker_that_differs_is_found_when_it_joins_and_forgotten_when_it_goes(stage: Stage) -> None:
    async with SimulatedWorker(tokenizer=qwen3()) as good, SimulatedWorker(tokenizer=checkpoint()) as other:
        trial = await session_trial(stage, good)
        assert (await ask(trial, CHAT))[0].status == 200
        assert (await post(trial.router, "/add_worker", url=other.url)).status == 200
        assert (await ask(trial, CHAT))[0].status == 502
        assert (await post(trial.router, "/remove_worker", url=other.url)).status == 200
        reply, records = await ask(trial, CHAT)
        assert (reply.status, len(records)) == (200, 1)
        await stage.provoked("tokenizer_differs")


@pytest.mark.parametrize("status", [404, 500, 400, 401, 200])
@pytest.mark.parametrize("body", [b"{}", b"no JSON", b'{"tokens": "x"}', b"[1]"])
async def test_engine_that_tells_no_tokens_is_traced(stage: Stage, status: int, body: bytes) -> None:
    async with SimulatedWorker(tokenizer=qwen3()) as worker:
        worker.faults.status(status, body, path="/v1/tokenize", times=None)
        trial = await session_trial(stage, worker)
        for _ in range(5):
            reply, records = await ask(trial, CHAT)
            assert (reply.status, len(records)) == (200, 1)


async def test_lost_connection_while_comparing_is_asked_again(stage: Stage) -> None:
    async with SimulatedWorker(tokenizer=checkpoint()) as worker:
        worker.faults.reset_in_headers(path="/v1/tokenize", times=1)
        trial = await session_trial(stage, worker, max_retries=0)
        assert [(await ask(trial, CHAT))[0].status for _ in range(2)][-1] == 502
        await stage.provoked("tokenizer_differs")


def wrong_type(directory: Path) -> str:
    """A ByteLevel tokenizer of another kind under `model_type: qwen2`, whose pre-tokenizer transformers replaces."""
    shutil.copytree(tokenizer_directory("deepseek_v3"), directory)
    (directory / "config.json").write_text('{"model_type": "qwen2"}')
    return str(directory)


def of_code(directory: Path) -> str:
    """A tokenizer that is code of its own over a file of tiktoken."""
    directory.mkdir()
    auto = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    config = {"tokenizer_class": "OwnTokenizer", "auto_map": auto}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "tokenization_own.py").write_text("raise RuntimeError('it was run')\n")
    (directory / "tiktoken.model").write_bytes(b"aGk= 0\n")
    return str(directory)


def test_wrongly_loaded_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"transformers .* otherwise than its tokenizer.json"):
        load_tokenizer(RouterConfig(hf_checkpoint=wrong_type(tmp_path / "model")))


@pytest.mark.parametrize("name", ["qwen3", "llama2", "gemma3", "deepseek_v3", "gptoss"])
def test_rightly_loaded_tokenizers_are_taken(name: str) -> None:
    assert load_tokenizer(RouterConfig(hf_checkpoint=tokenizer_directory(name))).encode("hello  world")


def test_tokenizer_of_code_is_refused_and_names_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object) -> str:
        raise AssertionError("a question on the terminal")

    monkeypatch.setattr("builtins.input", asked)
    with pytest.raises(ConfigError, match="--trust-remote-tokenizer"):
        load_tokenizer(RouterConfig(hf_checkpoint=of_code(tmp_path / "model")))


def test_trusted_tokenizer_code_is_run(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="it was run"):
        load_tokenizer(RouterConfig(hf_checkpoint=of_code(tmp_path / "model"), trust_remote_tokenizer=True))
