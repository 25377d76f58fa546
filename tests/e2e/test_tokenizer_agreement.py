"""Nothing is traced with a tokenizer that is not the engine's, and no wrongly loaded one is taken."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from miles_router.errors import ConfigError
from miles_router.fleet.workers import WorkerState
from miles_router.middlewares.checkpoint import load_tokenizer
from miles_router.settings.config import MiddlewareSpec, RouterConfig
from miles_router.testing import SimulatedWorker
from miles_router.testing.worker.model.hf_vocabulary import DirectoryTokenizer
from tests.support.cache_trial import CACHE, checkpoint, trial_before
from tests.support.fleet import PROBING, post
from tests.support.session_apis import MESSAGES, RESPONSES, Api
from tests.support.session_trial import CHAT, IM_END, SessionTrial, qwen3, session_trial, user
from tests.support.stage import Stage
from tests.support.tokenizers import tokenizer_directory
from tests.support.waiting import until

pytestmark = pytest.mark.alone("each process compares by itself, and logs what differs")
TOKENIZE = "/v1/tokenize"
QWEN3 = tokenizer_directory("qwen3")
HI = [user("Hi")]
TEXT = {"text": "Hi", "sampling_params": {"max_new_tokens": 2}}


async def ask(trial: SessionTrial, path: str, *, stream: bool = False) -> Any:
    session = await trial.create()
    reply = await Api(path).post(trial, session, Api(path).body(HI, stream=stream))
    return reply, (await trial.read(session))["records"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_session_is_refused_where_engines_tokenize_otherwise(stage: Stage, path: str, *, stream: bool) -> None:
    async with SimulatedWorker(tokenizer=checkpoint()) as worker:
        trial = await session_trial(stage, worker)
        reply, records = await ask(trial, path, stream=stream)
        assert (reply.status, records) == (502, [])
        assert f"{worker.url} tokenizes" in reply.body.decode()
        assert not trial.log
        await stage.provoked("tokenizer_differs")


async def test_text_cache_is_refused_where_the_engine_tokenizes_otherwise(stage: Stage) -> None:
    async with SimulatedWorker(tokenizer=qwen3()) as worker:
        trial = await trial_before(stage, worker)
        reply = await trial.post("/generate", TEXT)
        assert (reply.status, reply.json()["error"]["type"]) == (502, "upstream_error")
        assert "--trust-remote-tokenizer" in reply.json()["error"]["message"]
        assert not trial.log
        passed = await trial.post("/generate", {**TEXT, "image_data": "x.png"})
        assert passed.status != 502, "what is not traced passes"
        await stage.provoked("tokenizer_differs")


async def test_a_pool_with_another_tokenizer_is_no_teacher(stage: Stage) -> None:
    async with SimulatedWorker(tokenizer=qwen3()) as student, SimulatedWorker(tokenizer=checkpoint()) as teacher:
        trial = await session_trial(stage, student, model_id="m", more=[MiddlewareSpec(CACHE)])
        assert (await post(trial.router, "/workers", url=teacher.url, model_id="teacher")).status == 201
        session = await trial.create()
        await trial.chat(session, HI)
        for path, body in ((f"/sessions/{session}/samples", {}), ("/retrieve_from_text", {"text": "Hi"})):
            reply = await post(trial.router, path, **body, teacher="teacher")
            assert (reply.status, reply.json()["error"]["type"]) == (409, "conflict")
            assert f"{teacher.url} tokenizes a probe text differently" in reply.json()["error"]["message"]
        assert not teacher.log.at("/generate")
        await stage.provoked("tokenizer_differs")


async def test_worker_that_differs_is_forgotten_when_it_goes(stage: Stage) -> None:
    async with SimulatedWorker(tokenizer=qwen3()) as good, SimulatedWorker(tokenizer=checkpoint()) as other:
        trial = await session_trial(stage, other)
        assert (await ask(trial, CHAT))[0].status == 502
        assert (await post(trial.router, "/add_worker", url=good.url)).status == 200
        assert (await ask(trial, CHAT))[0].status == 200
        assert (await post(trial.router, "/remove_worker", url=good.url)).status == 200
        assert (await ask(trial, CHAT))[0].status == 502
        assert (await post(trial.router, "/remove_worker", url=other.url)).status == 200
        assert (await ask(trial, CHAT))[0].status == 503, "there is no worker, and no difference"
        await stage.provoked("tokenizer_differs")


@pytest.mark.parametrize(
    ("status", "body"), [(404, b"{}"), (500, b"no JSON"), (200, b'{"tokens": "x"}'), (200, b"[1]")]
)
async def test_engine_that_tells_no_tokens_is_traced(stage: Stage, status: int, body: bytes) -> None:
    async with SimulatedWorker(tokenizer=qwen3()) as worker:
        worker.faults.status(status, body, path=TOKENIZE, times=None)
        trial = await session_trial(stage, worker)
        for _ in range(5):
            reply, records = await ask(trial, CHAT)
            assert (reply.status, len(records)) == (200, 1)


@pytest.mark.parametrize("way", ["start", "/add_worker", "/workers"])
async def test_worker_that_joins_is_compared_before_any_request(stage: Stage, way: str) -> None:
    async with SimulatedWorker(tokenizer=checkpoint()) as worker:
        trial = await session_trial(stage, *([worker] if way == "start" else []), hf_checkpoint=QWEN3)
        if way != "start":
            assert (await post(trial.router, way, url=worker.url)).status < 300
        await stage.provoked("tokenizer_differs")
        assert (await post(trial.router, "/generate", **TEXT)).status == 200, "untraced requests may use it"
        assert (await ask(trial, CHAT))[0].status == 502
        assert len(worker.log.at(TOKENIZE)) == 1, "the request has not asked again"


async def test_registration_does_not_wait_for_the_comparison(stage: Stage) -> None:
    async with SimulatedWorker(tokenizer=qwen3()) as worker:
        worker.faults.hang(path=TOKENIZE, times=None)
        trial = await session_trial(stage, hf_checkpoint=QWEN3)
        assert (await post(trial.router, "/add_worker", url=worker.url)).status == 200
        await until(lambda: bool(worker.log.at(TOKENIZE)), "it is asked")
        assert (await post(trial.router, "/generate", **TEXT)).status == 200


async def test_new_process_at_an_address_is_compared_when_it_returns(stage: Stage) -> None:
    async with SimulatedWorker(tokenizer=qwen3()) as worker:
        trial = await session_trial(stage, worker, **PROBING)
        await until(lambda: bool(worker.log.at(TOKENIZE)), "the first process is asked")
    await until(lambda: trial.router.pool.get(worker.url).state is WorkerState.QUARANTINED, "it is out")
    async with SimulatedWorker(tokenizer=checkpoint(), port=worker.port):
        await stage.provoked("tokenizer_differs")


@pytest.mark.parametrize(("path", "stream"), [(CHAT, False), (MESSAGES, True), (RESPONSES, True)])
async def test_traced_requests_go_only_to_workers_that_agree(stage: Stage, path: str, *, stream: bool) -> None:
    async with SimulatedWorker(tokenizer=checkpoint()) as other, SimulatedWorker(tokenizer=qwen3()) as good:
        trial = await session_trial(stage, other, good)
        for _ in range(4):
            reply, records = await ask(trial, path, stream=stream)
            assert (reply.status, len(records)) == (200, 1)
        assert other.log.at(CHAT) == other.log.at("/generate") == []
        await asyncio.gather(*(post(trial.router, "/generate", **TEXT) for _ in range(8)))
        assert other.log.at("/generate"), "untraced requests use both"
        await stage.provoked("tokenizer_differs")


class Adding(DirectoryTokenizer):
    """Begins and ends each text with a special token, asked for or not."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [IM_END, *super().encode(text, add_special_tokens=add_special_tokens), IM_END]


async def test_special_tokens_around_a_text_are_no_difference(stage: Stage) -> None:
    async with SimulatedWorker(tokenizer=Adding(QWEN3)) as worker:
        trial = await session_trial(stage, worker)
        reply, records = await ask(trial, CHAT)
        assert (reply.status, len(records), len(worker.log.at(TOKENIZE))) == (200, 1, 1)


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
    with pytest.raises(ConfigError, match=r"transformers .* that differs from its tokenizer.json"):
        load_tokenizer(RouterConfig(hf_checkpoint=wrong_type(tmp_path / "model")))


#: What a release could put in place of a part of a tokenizer.
OTHER_PARTS: dict[str, Any] = {
    "pre_tokenizer": {"type": "WhitespaceSplit"},
    "normalizer": {"type": "Lowercase"},
    "decoder": {"type": "Fuse"},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_end|>": {"id": "<|im_end|>", "ids": [2], "tokens": ["<|im_end|>"]}},
    },
}


def changed(described: dict[str, Any], part: str) -> dict[str, Any]:
    if part in OTHER_PARTS:
        return {**described, part: OTHER_PARTS[part]}
    first, begin, *others = described["added_tokens"]
    return {**described, "added_tokens": [first, *([] if part == "added_tokens" else [{**begin, part: True}]), *others]}


@pytest.mark.parametrize("part", [*OTHER_PARTS, "added_tokens", "lstrip", "rstrip", "single_word"])
def test_part_that_transformers_replaces_is_found(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The release is imitated by a loader that reads another file than the checkpoint's."""
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    for directory in (right, wrong):
        shutil.copytree(checkpoint(), directory)
    described = json.loads((right / "tokenizer.json").read_bytes())
    (wrong / "tokenizer.json").write_text(json.dumps(changed(described, part)))
    load = PreTrainedTokenizerFast.from_pretrained
    assert load_tokenizer(RouterConfig(hf_checkpoint=str(right)))
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **how: load(str(wrong), **how))
    with pytest.raises(ConfigError, match=r"that differs from its tokenizer.json"):
        load_tokenizer(RouterConfig(hf_checkpoint=str(right)))


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
