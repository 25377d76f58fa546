"""Two trained models behind one router: each has sessions, texts, samples, metrics and pauses of its own, with its own
tokenizer, below `/models/MODEL_ID/`."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from miles_router import create_app
from miles_router.client import RouterClient
from miles_router.errors import ConfigError
from miles_router.middlewares import ASGIApp, Receive, Router, Scope, Send
from miles_router.settings.config import MiddlewareSpec, RouterConfig
from miles_router.testing import SimulatedWorker
from tests.support.browser import Browser
from tests.support.cache_trial import CACHE, Trial, checkpoint, exactly_recorded
from tests.support.dashboards import cells, dashboard, go
from tests.support.fleet import JSON, info
from tests.support.http import Pairs, RawReply
from tests.support.layers import layered, ports, post, process_at, written
from tests.support.owned import name_of
from tests.support.running_router import NoBannerError, RunningRouter, router_process, running_router
from tests.support.session_apis import BOTH, PLAIN, Api, case
from tests.support.session_trial import CHAT, SESSIONS, SessionTrial, exactly, message_of, qwen3, user
from tests.support.tokenizers import tokenizer_directory
from tests.support.waiting import until

SOLVER, CODER = "solver", "coder"
BELOW = f"/models/{CODER}"
DASHBOARD = "middleware_hub.dashboard_middleware.DashboardMiddleware"
HI = {"text": "Hi", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}


class Below:
    """A router, as its clients see it whose address ends with a model's name."""

    def __init__(self, router: RunningRouter) -> None:
        self.url = router.url + BELOW
        self._router = router

    async def ask(self, method: str, target: str, headers: Pairs = (), body: bytes | None = None) -> RawReply:
        return await self._router.ask(method, BELOW + target, headers, body)


class Scene:
    """A router that trains two models, with a worker each."""

    def __init__(self, router: RunningRouter, solver: SimulatedWorker, coder: SimulatedWorker) -> None:
        self.router = router
        self.workers = {SOLVER: solver, CODER: coder}
        self.solver = SessionTrial(router, [solver])
        below: Any = Below(router)
        self.coder = SessionTrial(below, [coder])

    async def statistics(self) -> dict[str, Any]:
        return dict((await info(self.router))["statistics"])

    def texts(self, name: str) -> Trial:
        return Trial(self.solver.router if name == SOLVER else self.coder.router, self.workers[name])


def settings(**more: Any) -> dict[str, Any]:
    return {
        "middlewares": (MiddlewareSpec(SESSIONS), MiddlewareSpec(CACHE)),
        "model_id": SOLVER,
        "hf_checkpoint": tokenizer_directory("qwen3"),
        "trained_models": (f"{CODER}={checkpoint()}",),
        **more,
    }


@asynccontextmanager
async def workers_of() -> AsyncIterator[tuple[SimulatedWorker, SimulatedWorker]]:
    async with (
        SimulatedWorker(tokenizer=qwen3(), weight_version="1") as solver,
        SimulatedWorker(tokenizer=checkpoint(), weight_version="C1") as coder,
    ):
        yield solver, coder


@asynccontextmanager
async def scene(**more: Any) -> AsyncIterator[Scene]:
    async with workers_of() as (solver, coder), running_router(**settings(**more)) as router:
        yield await registered(router, solver, coder)


async def registered(router: RunningRouter, solver: SimulatedWorker, coder: SimulatedWorker) -> Scene:
    made = Scene(router, solver, coder)
    assert (await made.solver.ask("POST", "/workers", {"url": solver.url})).status == 201
    assert (await made.coder.ask("POST", "/workers", {"url": coder.url})).json()["model_id"] == CODER
    return made


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[Scene]:
    async with scene() as made:
        yield made


async def test_each_model_has_exact_sessions_in_each_api_under_its_own_address(shared: Scene) -> None:
    for api in PLAIN:
        for stream in BOTH:
            for name, trial in ((SOLVER, shared.solver), (CODER, shared.coder)):
                with case(api, stream, name):
                    await two_turns(trial, api, name, stream=stream)


async def two_turns(trial: SessionTrial, api: Api, name: str, *, stream: bool) -> None:
    made = (await trial.ask("POST", "/sessions", {})).json()
    session, before = made["session_id"], len(trial.worker.log.generations)
    assert urlsplit(made["base_url"]).path == f"{urlsplit(trial.router.url).path}/sessions/{session}/v1"
    items: Any = [user("Hi")] if api in PLAIN[:1] or api.path == "/v1/messages" else "Hi"
    said = await api.turn(trial, session, items, 8, stream=stream)
    if isinstance(items, list):
        await api.turn(trial, session, [*items, *said.items, user("Go on")], 8, stream=stream)
    turns = list(trial.worker.log.generations)[before:]
    (sample,) = await trial.samples(session)
    exactly(sample, *turns)
    assert sample["metadata"]["model_id"] == name


async def test_texts_of_a_model_are_found_under_its_address_and_by_its_name(shared: Scene) -> None:
    for name in (SOLVER, CODER):
        texts = shared.texts(name)
        for body in ({}, {"model": name}):
            with case(name, body):
                answer = await texts.generate(**HI, **body)
                await exactly_recorded(texts, answer, texts.given()[0])
                first = texts.given()[0] + answer["output_ids"]
                longer = HI["text"] + answer["text"] + " and on"
                again = await texts.generate(**{**HI, "text": longer}, **body)
                assert texts.given()[0][: len(first)] == first
                await exactly_recorded(texts, again, texts.given()[0])
        other = shared.texts(SOLVER if name == CODER else CODER)
        found = await other.post("/retrieve_from_text", {"rid": answer["meta_info"]["id"]})
        assert found.status == 404


async def test_a_request_at_the_root_is_recorded_for_the_model_that_it_names(shared: Scene) -> None:
    at_root = Trial(shared.router, shared.workers[CODER])
    answer = await at_root.generate(**HI, model=CODER)
    await exactly_recorded(shared.texts(CODER), answer, at_root.given()[0])
    named = [("X-Session-Id", "by-header")]
    body = {"model": CODER, "messages": [user("Hi")], "max_tokens": 4}
    assert (await shared.solver.ask("POST", CHAT, body, named)).status == 200
    (sample,) = await shared.coder.samples("by-header")
    exactly(sample, shared.workers[CODER].log.generations[-1])
    assert (await shared.solver.ask("GET", "/sessions/by-header")).status == 404


async def test_sessions_of_one_name_are_two_and_no_model_answers_for_another(shared: Scene) -> None:
    for trial in (shared.solver, shared.coder):
        await trial.create("same")
        await trial.chat("same", [user("Hi")])
    for trial in (shared.solver, shared.coder):
        listed = (await trial.ask("GET", "/sessions")).json()["sessions"]
        assert [each["turns"] for each in listed if each["session_id"] == "same"] == [1]
        (sample,) = await trial.samples("same")
        exactly(sample, trial.worker.log.generations[-1])
    asked = {name: len(worker.log.generations) for name, worker in shared.workers.items()}
    for trial, other in ((shared.solver, CODER), (shared.coder, SOLVER)):
        refused = await trial.turn("same", [user("Hi")], model=other)
        assert (refused.status, other in refused.json()["error"]["message"]) == (400, True)
    assert {name: len(worker.log.generations) for name, worker in shared.workers.items()} == asked
    for name in ("gpt-4", "default", "m"):
        with case(name):
            assert (await shared.coder.turn("same", [user("Hi")], model=name)).status == 200


async def test_a_paused_model_does_not_stop_the_other(shared: Scene) -> None:
    assert (await shared.coder.ask("POST", "/pause_generation", {})).status == 200
    try:
        assert shared.workers[CODER].log.at("/pause_generation")
        assert not shared.workers[SOLVER].log.at("/pause_generation")
        for trial, paused in ((shared.coder, [CODER]), (shared.solver, [CODER, SOLVER])):
            pauses = (await trial.ask("GET", "/router/run")).json()["pauses"]
            assert [each["model_id"] for each in pauses if each["end"] is None] == paused[:1]
            assert {each["model_id"] for each in pauses} <= {*paused}
        await shared.solver.chat(await shared.solver.create(), [user("Hi")])
    finally:
        assert (await shared.coder.ask("POST", "/continue_generation", {})).status == 200
    wrong = await shared.coder.ask("POST", f"/pause_generation?model_id={SOLVER}", {})
    assert (wrong.status, "leave model_id out" in wrong.json()["error"]["message"]) == (400, True)


async def test_what_a_pause_cut_is_continued_by_the_same_model() -> None:
    slow: Any = {"tokenizer": checkpoint(), "token_latency_s": 0.002, "stop_probability": 0.0}
    async with (
        SimulatedWorker(tokenizer=checkpoint(), weight_version="1") as solver,
        SimulatedWorker(**slow, weight_version="C1", seed=2) as coder,
        running_router(**settings(hf_checkpoint=checkpoint(), partial_rollout="resume")) as router,
    ):
        made = await registered(router, solver, coder)
        session = await made.coder.create()
        texts = {"max_new_tokens": 100, "ignore_eos": True}
        works = [
            asyncio.ensure_future(made.coder.turn(session, [user("Hi")], max_tokens=100, ignore_eos=True)),
            asyncio.ensure_future(made.texts(CODER).post("/generate", {"text": "Hi", "sampling_params": texts})),
        ]
        await until(lambda: len([each for each in coder.engine.running.values() if each.output_ids]) == 2, "both run")
        assert (await made.coder.ask("POST", "/pause_generation", {"mode": "abort"})).status == 200
        renamed = {"new_version": "C2", "abort_all_requests": False}
        assert (await made.coder.ask("POST", "/update_weight_version", renamed)).status == 200
        assert (await made.coder.ask("POST", "/continue_generation", {})).status == 200
        turn, text = [work.json() for work in await asyncio.gather(*works)]
        (sample,) = await made.coder.samples(session)
        retrieved = await made.texts(CODER).retrieve(rid=text["meta_info"]["id"])
        for found in (sample, retrieved):
            assert [each["version"] for each in found["weight_versions"]] == ["C1", "C2"]
            assert sum(found["loss_mask"]) == 100
        assert turn["usage"]["completion_tokens"] == 100
        assert not solver.log.generations


async def test_what_an_address_of_a_model_shows_is_of_that_model(shared: Scene) -> None:
    for trial in (shared.solver, shared.coder):
        await trial.chat(await trial.create(), [user("Hi")])
    (worker,) = (await shared.coder.ask("GET", "/workers")).json()["workers"]
    assert worker["url"] == shared.workers[CODER].url
    assert (await shared.coder.ask("GET", "/list_workers")).json()["urls"] == [worker["url"]]
    assert (await shared.coder.ask("GET", "/readiness")).json()["workers_total"] == 1
    assert len((await shared.router.ask("GET", "/workers")).json()["workers"]) == 2
    ids = {
        name: {each["id"] for each in (await trial.ask("GET", "/router/episodes?kind=session")).json()["episodes"]}
        for name, trial in ((SOLVER, shared.solver), (CODER, shared.coder))
    }
    assert ids[CODER]
    assert ids[SOLVER]
    assert ids[CODER] & ids[SOLVER] <= {"same"}
    told = await shared.statistics()
    assert told[f"openai_sessions:{CODER}"]["turns"] > 0
    below = (await shared.coder.ask("GET", "/router/info")).json()
    assert (below["weight_version"], below["workers_total"], [*below["pools"]]) == ("C1", 1, [CODER])
    assert [each["url"] for each in below["workers"]] == [shared.workers[CODER].url]
    assert below["statistics"]["openai_sessions"]["turns"] > 0
    assert not [name for name in below["statistics"] if ":" in name]
    text = (await shared.router.ask("GET", "/metrics")).body.decode()
    lines = [line for line in text.splitlines() if line.startswith("miles_router_sessions_turns_total")]
    assert {CODER in line for line in lines} == {True, False}, "each model has lines of its own"


async def test_a_worker_is_named_only_below_its_own_model(shared: Scene) -> None:
    others = shared.workers[SOLVER].url
    ids = {each["url"]: each["id"] for each in (await shared.router.ask("GET", "/workers")).json()["workers"]}
    for name in (ids[others], quote(others, safe="")):
        for method in ("GET", "DELETE"):
            with case(method, name):
                assert (await shared.coder.ask(method, f"/workers/{name}")).status == 404
                assert (await shared.router.ask("GET", f"/workers/{name}")).json()["url"] == others
    own = quote(shared.workers[CODER].url, safe="")
    assert (await shared.coder.ask("GET", f"/workers/{own}")).json()["model_id"] == CODER
    assert (await shared.coder.ask("POST", "/remove_worker", {"url": others})).status == 404
    assert len((await shared.router.ask("GET", "/workers")).json()["workers"]) == 2


async def test_a_name_that_an_agent_makes_up_is_no_question_to_workers(shared: Scene) -> None:
    for trial in (shared.solver, shared.coder):
        session, asked = await trial.create(), len(trial.worker.log.at("/v1/models"))
        assert (await trial.turn(session, [user("Hi")], model="gpt-4")).status == 200
        assert len(trial.worker.log.at("/v1/models")) == asked


async def test_an_adapter_of_another_model_is_never_answered_by_base_weights() -> None:
    simulated: Any = {"tokenizer": checkpoint(), "weight_version": "1", "enable_lora": True}
    async with (
        SimulatedWorker(**simulated, model_path="org/base") as solver,
        SimulatedWorker(**simulated, model_path="org/base") as coder,
        running_router(**settings(hf_checkpoint=checkpoint())) as router,
    ):
        made = await registered(router, solver, coder)
        for trial, name in ((made.solver, "proofs"), (made.coder, "tests")):
            adapter = {"lora_name": name, "lora_path": "/x"}
            assert (await trial.ask("POST", "/load_lora_adapter", adapter)).status == 200
        for trial, name, other in ((made.solver, "proofs", "tests"), (made.coder, "tests", "proofs")):
            session = await trial.create()
            for model in (name, f"default:{name}", f"org/base:{name}", f"any:{name}"):
                with case(name, model):
                    assert (await trial.turn(session, [user("Hi")], model=model)).status == 200
                    assert trial.worker.log.generations[-1].lora_path == name
            asked = len(trial.worker.log.generations)
            for model in (other, f"any:{other}"):
                with case(name, model):
                    refused = await trial.turn(session, [user("Hi")], model=model)
                    assert (refused.status, refused.error_type) == (400, "invalid_request"), refused.body
            assert len(trial.worker.log.generations) == asked
            for model in ("org/base", "any", "default"):
                with case(name, model):
                    assert (await trial.turn(session, [user("Hi")], model=model)).status == 200
                    assert trial.worker.log.generations[-1].lora_path is None


async def test_the_path_names_the_model_of_a_body_that_cannot_be_read(shared: Scene) -> None:
    packed, headers = gzip.compress(b'{"text": "Hi"}'), [("Content-Encoding", "gzip")]
    below = await shared.coder.ask("POST", "/tokenize", packed, headers)
    assert "model in this body" not in below.body.decode()
    at_root = await shared.solver.ask("POST", "/tokenize", packed, headers)
    assert (at_root.status, "model in this body" in at_root.body.decode()) == (400, True)


async def test_a_model_with_another_tokenizer_is_no_teacher_of_the_other(shared: Scene) -> None:
    for trial, teacher in ((shared.solver, CODER), (shared.coder, SOLVER)):
        with case(teacher):
            session = await trial.create()
            await trial.chat(session, [user("Hi")])
            reply = await trial.ask("POST", f"/sessions/{session}/samples", {"format": "json", "teacher": teacher})
            assert (reply.status, reply.error_type) == (409, "conflict"), reply.body
            assert shared.workers[teacher].url in reply.body.decode()
            assert (await trial.turn(session, [user("Ho")])).status == 200, "as the model's own worker it agrees"


async def test_the_dashboard_below_a_model_asks_and_shows_that_model_alone(browser: Browser) -> None:
    layers = (MiddlewareSpec(DASHBOARD), *settings()["middlewares"])
    async with scene(middlewares=layers) as made:
        for trial, name in ((made.solver, SOLVER), (made.coder, CODER)):
            for session in ("same", f"of-{name}"):
                await trial.create(session, metadata={"group": "prompt-1"})
                await trial.chat(session, [user(f"Hi {name}")])
            await made.texts(name).generate(**HI, model=name)
        async with dashboard(browser, f"{made.router.url}{BELOW}", "#/episodes") as page:
            links = await page.value("[...document.querySelectorAll('#view a')].map((link) => link.href)")
            assert {link.partition("#")[0] for link in links} == {f"{made.router.url}{BELOW}/dashboard"}
            rows = [row[0] for row in await cells(page, "episodes")]
            assert rows[-2:] == [f"of-{CODER}", "same"]
            assert [row.startswith("text@") for row in rows] == [True, False, False]
            for episode in (*rows, "same"):
                await go(page, f"#/episodes/{quote(episode, safe='')}")
                await page.until("document.querySelector('.tokens .token')")
                assert f"Hi {SOLVER}" not in await page.text("#view")
            await page.until(f"document.getElementById('view').textContent.includes('Hi {CODER}')")
            for view in ("#/run", "#/fleet"):
                await go(page, view)
            assert await page.text("#workers") == "1 of 1"
            assert made.workers[SOLVER].url not in await page.text("#view")
            asked = [urlsplit(each).path for each in page.asked]
            assert [path for path in asked if not path.startswith(f"{BELOW}/")] == []


async def test_an_unknown_model_is_404_and_nothing_is_asked(shared: Scene) -> None:
    for path in ("/models/other/sessions", f"{BELOW}", "/models/"):
        with case(path):
            answer = await shared.router.ask("POST", path, JSON, b"{}")
            assert (answer.status, answer.json()["error"]["code"]) == (404, "model_not_found")


@dataclass
class Equal:
    """A middleware that is a dataclass: it has an equality of its own, and no hash."""

    app: ASGIApp
    router: Router = field(kw_only=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


async def test_a_middleware_needs_no_hash() -> None:
    equal = MiddlewareSpec(f"{__name__}.{Equal.__name__}")
    async with workers_of() as (solver, _):
        for more in ({}, settings()):
            layers = (*more.get("middlewares", ()), equal, equal)
            async with running_router(solver.url, **{**more, "middlewares": layers}) as router:
                assert (await router.ask("POST", "/generate", JSON, json.dumps(HI).encode())).status == 200


async def test_the_client_speaks_to_one_model(shared: Scene) -> None:
    async with RouterClient(f"{shared.router.url}{BELOW}") as client:
        session = await client.create_session()
        assert session.base_url.startswith(f"{shared.router.url}{BELOW}/sessions/")
        await shared.coder.chat(session.id, [user("Hi")])
        paused = len(shared.workers[CODER].log.at("/pause_generation"))
        async with client.paused():
            assert len(shared.workers[CODER].log.at("/pause_generation")) == paused + 1


async def test_sessions_and_texts_of_each_model_survive_a_restart(tmp_path: Path) -> None:
    more = {"state_dir": str(tmp_path)}
    async with workers_of() as (solver, coder):
        async with running_router(**settings(**more)) as router:
            made = await registered(router, solver, coder)
            before = []
            for trial in (made.solver, made.coder):
                await trial.create("same")
                answer = await trial.chat("same", [user("Hi")])
                before.append((await trial.samples("same"))[0])
            rids = [(await made.texts(name).generate(**HI))["meta_info"]["id"] for name in made.workers]
            texts = [await made.texts(name).retrieve(rid=rid) for name, rid in zip(made.workers, rids, strict=True)]
        async with running_router(**settings(**more)) as router:
            made = Scene(router, solver, coder)
            assert (await made.solver.samples("same")) == [before[0]]
            held = await made.statistics()
            assert (held["openai_sessions"]["sessions"], held[f"openai_sessions:{CODER}"]["sessions"]) == (1, 0)
            for trial, sample in zip((made.solver, made.coder), before, strict=True):
                listed = (await trial.ask("GET", "/sessions")).json()["sessions"]
                assert [each["session_id"] for each in listed] == ["same"]
                assert (await trial.samples("same")) == [sample]
            again = [await made.texts(name).retrieve(rid=rid) for name, rid in zip(made.workers, rids, strict=True)]
            assert again == texts
            history = [user("Hi"), message_of(answer), user("Go on")]
            await made.coder.chat("same", history)
            (sample,) = await made.coder.samples("same")
            assert sample["tokens"][: len(before[1]["tokens"])] == before[1]["tokens"]


@pytest.mark.parametrize("kept", [False, True], ids=["lost", "kept"])
async def test_sessions_of_a_killed_process_are_lost_or_kept_for_each_model(tmp_path: Path, *, kept: bool) -> None:
    more = {"state_dir": str(tmp_path / "state")} if kept else {}
    given = {"hf_checkpoint": checkpoint(), "model_id": SOLVER, "trained_models": [f"{CODER}={checkpoint()}"]}
    config = written(tmp_path, ((SESSIONS, {}),), **given, **more)
    lost, other = (name_of(index, 2, "agent") for index in range(2))
    async with (
        SimulatedWorker(tokenizer=checkpoint(), weight_version="1") as solver,
        SimulatedWorker(tokenizer=checkpoint(), weight_version="C1", seed=2) as coder,
        layered(config, solver) as router,
    ):
        own = await ports(router)
        assert (await post(own[0].url, f"{BELOW}/workers", {"url": coder.url})).status == 201
        before = {}
        for mount in ("", BELOW):
            for name in (lost, other):
                made = (await post(own[1].url, f"{mount}/sessions", {"session_id": name})).json()
                assert urlsplit(made["owner_url"]).path == mount
                turn = {"model": "any", "messages": [user("Hi")], "max_tokens": 4}
                assert (await post(own[0].url, f"{mount}/sessions/{name}{CHAT}", turn)).status == 200
                before[mount, name] = await post(own[1].url, f"{mount}/sessions/{name}/samples", {"format": "json"})
            listed = (await own[1].ask("GET", f"{mount}/sessions")).json()["sessions"]
            assert {each["session_id"] for each in listed} == {lost, other}
        await router.kill(await process_at(router, own[0]))
        await router.whole()
        for each in own:
            for (mount, name), sample in before.items():
                found = await post(each.url, f"{mount}/sessions/{name}/samples", {"format": "json"})
                assert found.body == sample.body if kept or name == other else found.status == 410


async def test_a_sessions_key_opens_that_session_of_its_model_alone() -> None:
    data: Pairs = [("Authorization", "Bearer data")]
    async with workers_of() as (solver, coder), running_router(**settings(api_key="data")) as router:
        made = Scene(router, solver, coder)
        assert (await made.coder.ask("POST", "/workers", {"url": coder.url}, data)).status == 201
        created = await made.coder.ask("POST", "/sessions", {"session_id": "s", "contract": {"key": True}}, data)
        own: Pairs = [("Authorization", f"Bearer {created.json()['api_key']}")]
        assert (await made.coder.turn("s", [user("Hi")], own)).status == 200
        assert (await made.solver.turn("s", [user("Hi")], own)).status == 401
        assert (await made.coder.ask("GET", "/sessions", headers=own)).status == 401
        assert (await made.coder.ask("POST", "/pause_generation", {}, own)).status == 401
        assert (await made.coder.ask("POST", "/sessions", {})).status == 401


async def test_before_its_first_worker_a_model_has_sessions_and_no_answers() -> None:
    async with workers_of() as (solver, coder), running_router(**settings()) as router:
        made = Scene(router, solver, coder)
        assert (await made.solver.ask("POST", "/workers", {"url": solver.url})).status == 201
        answer = await made.coder.turn(await made.coder.create(), [user("Hi")])
        assert (answer.status, answer.error_type) == (503, "no_worker_available")
        assert (await made.coder.ask("GET", "/readiness")).status == 503
        by_name = await made.router.ask("POST", "/generate", JSON, b'{"model": "coder", "text": "Hi"}')
        assert by_name.status == 503
        assert not solver.log.generations


async def test_a_checkpoint_that_cannot_be_read_is_named_with_its_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^trained_models: coder: hf_checkpoint: cannot load a tokenizer from"):
        async with running_router(**settings(trained_models=(f"{CODER}={tmp_path}",))):
            pass


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"trained_models": ("coder=/c",)}, "set --model-id"),
        ({"model_id": "coder", "trained_models": ("coder=/c",)}, "is the default model already"),
        ({"model_id": "a", "trained_models": ("coder=/c", "coder=/d")}, "there twice"),
        ({"model_id": "a", "trained_models": ("coder",)}, "MODEL_ID=CHECKPOINT"),
        ({"model_id": "a", "trained_models": ("org/coder=/c",)}, "MODEL_ID=CHECKPOINT"),
        ({"model_id": "a", "trained_models": ("..=/c",)}, "MODEL_ID=CHECKPOINT"),
    ],
)
def test_settings_that_name_no_models_are_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        RouterConfig(**given)


@pytest.mark.alone("the command's own start")
async def test_a_state_directory_of_another_default_model_is_refused_at_the_start(tmp_path: Path) -> None:
    state = ("--state-dir", str(tmp_path), "--no-dashboard")
    for model in ("solver", "solver"):
        async with router_process(*state, "--model-id", model):
            pass
    async with router_process(*state):
        pass
    for more in ((), ("--processes", "2")):
        with pytest.raises(NoBannerError, match="of the model 'solver', not of 'coder'"):
            async with router_process(*state, "--model-id", "coder", *more):
                pass
    embedded = create_app(RouterConfig(state_dir=str(tmp_path), model_id="coder"))
    with pytest.raises(ConfigError, match="of the model 'solver', not of 'coder'"):
        async with embedded.running():
            pass


@pytest.mark.alone("of several processes the leader learns from the others which middlewares there are")
async def test_a_worker_whose_model_the_settings_no_longer_allow_is_left_out(tmp_path: Path) -> None:
    async with SimulatedWorker(tokenizer=qwen3()) as judge:
        for named, kept in (({}, [judge.url]), ({"model_id": None}, [])):
            async with running_router(**settings(state_dir=str(tmp_path), trained_models=(), **named)) as router:
                if named == {}:
                    body = {"url": judge.url, "model_id": "judge"}
                    assert (await SessionTrial(router, []).ask("POST", "/workers", body)).status == 201
                assert (await router.ask("GET", "/list_workers")).json()["urls"] == kept


async def test_a_worker_from_before_the_router_had_a_model_id_shows_it_after_a_restart(tmp_path: Path) -> None:
    unnamed = {"state_dir": str(tmp_path), "trained_models": (), "model_id": None}
    async with SimulatedWorker(tokenizer=qwen3()) as worker:
        for named, shown in ((unnamed, None), ({"state_dir": str(tmp_path)}, SOLVER)):
            async with running_router(**settings(**named)) as router:
                if named is unnamed:
                    assert (await SessionTrial(router, []).ask("POST", "/workers", {"url": worker.url})).status == 201
                (found,) = (await router.ask("GET", "/workers")).json()["workers"]
                assert (found["url"], found.get("model_id")) == (worker.url, shown)
