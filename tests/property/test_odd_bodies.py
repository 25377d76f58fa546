"""Whatever a body has in it: it is refused by name and changes nothing, or a worker judges it. It breaks nobody else's
request."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from miles_router.engines.paths import CHAT, GENERATE
from miles_router.settings.config import MiddlewareSpec
from miles_router.testing import SimulatedWorker
from tests.support.cache_trial import CACHE, checkpoint
from tests.support.experts_trial import EXPERTS, MOE, SHAPE
from tests.support.http import CutReply, RawReply
from tests.support.odd_bodies import DONE, HELD, HISTORY, TEXT, VALUES, Entrance, entrances
from tests.support.running_router import RunningRouter
from tests.support.session_trial import SESSIONS
from tests.support.stage import staged
from tests.support.tiers import examples

JSON = {"Content-Type": "application/json"}
#: Of all odd bodies, one of so many; coprime to the number of values, so that each value is tried at some fields.
THIN = 1 if examples(100) == 100 else 9
PARAMS = {"max_new_tokens": 2}
#: Routes that read what others' requests have left.
READING: Mapping[tuple[str, str], Any] = {
    ("GET", "/sessions"): None,
    ("GET", f"/sessions/{HELD}"): None,
    ("POST", f"/sessions/{HELD}/samples"): {},
    ("POST", f"/sessions/{DONE}/samples"): {},
    ("GET", "/trajectory/stats"): None,
    ("POST", "/trajectory/read"): {"session_id": DONE},
    ("POST", "/retrieve_from_text"): {"text": TEXT},
    ("POST", "/routed_experts"): {"session_id": DONE, "leaf": 0},
    ("GET", "/list_workers"): None,
    ("GET", "/router/info"): None,
    ("GET", "/metrics"): None,
}
ENTRANCES = entrances({"role": "assistant", "content": "an answer that is put in below"})


class Target:
    """A router with all three layers, something recorded in each, and one worker."""

    def __init__(self, router: RunningRouter) -> None:
        self.router = router

    async def ask(self, method: str, path: str, body: Any, headers: Mapping[str, str] = JSON) -> RawReply:
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        return await self.router.ask(method, path, list(headers.items()), raw)

    async def good(self, method: str, path: str, body: Any) -> RawReply:
        reply = await self.ask(method, path, body)
        assert reply.status in (200, 201), (path, reply.status, reply.body)
        return reply

    async def begin(self) -> list[Entrance]:
        """Sessions and a text as they were at the start; gives the entrances that lead to them."""
        reply = None
        for session in (HELD, DONE):
            await self.ask("DELETE", f"/sessions/{session}", None)
            await self.good("POST", "/sessions", {"session_id": session})
            turn = {"model": "m", "max_tokens": 2, "messages": HISTORY}
            reply = await self.good("POST", f"/sessions/{session}{CHAT}", turn)
        assert reply is not None
        return entrances(reply.json()["choices"][0]["message"])

    def held(self) -> dict[str, Any]:
        """What is held of clients' requests."""
        router = self.router.app.router
        sessions, texts = router.statistics["openai_sessions"](), router.statistics["radix_tree"]()
        rows, pool = router.statistics["routed_experts"](), [worker.url for worker in router.pool]
        of_sessions = {name: sessions[name] for name in ("sessions", "bytes", "turns")}
        return {**of_sessions, "texts": texts["entries"], "rows": rows["bytes"], "workers": pool}

    async def judge(self, entrance: Entrance, what: str, body: bytes) -> None:
        """One odd request: what the router itself refuses, it refuses by name, and nothing has changed."""
        before = self.held()
        with suppress(CutReply):  # cut by the worker: a defect of ours is seen by the stage
            reply = await self.ask("POST", entrance.path, body, {**JSON, **entrance.headers})
            self._judge(entrance, what, reply, before)
        assert not self.router.pool.in_flight, (entrance.path, what)
        if entrance.path == "/add_worker":  # nobody answers there, which others' pauses would be told
            await self.ask("POST", "/remove_worker", {"url": "http://127.0.0.1:1"})
        if "pause" in entrance.path:
            await self.good("POST", "/continue_generation", {})

    def _judge(self, entrance: Entrance, what: str, reply: RawReply, before: Mapping[str, Any]) -> None:
        if b'"request_id":"mr-' in reply.body and reply.status >= 400:
            assert reply.status < 500, (entrance.path, what, reply.body)
            assert reply.error_type != "internal_error"
            assert self.held() == before, (entrance.path, what, reply.body)

    async def still_read(self) -> None:
        """What others have recorded can be read."""
        for (method, path), body in READING.items():
            await self.good(method, path, body)


@asynccontextmanager
async def target() -> AsyncIterator[Target]:
    layers = (MiddlewareSpec(SESSIONS), MiddlewareSpec(CACHE), MiddlewareSpec(EXPERTS, {"moe_shape": SHAPE}))
    async with (
        staged() as stage,
        SimulatedWorker(moe=MOE, tokenizer=checkpoint(), weight_version="1") as worker,
    ):
        router = await stage.router(
            worker.url, hf_checkpoint=checkpoint(), partial_rollout="resume", middlewares=layers
        )
        made = Target(router)
        await made.good("POST", GENERATE, {"text": TEXT, "sampling_params": PARAMS})
        yield made
        # What the simulated worker says is wrong with a request, or with itself.
        theirs = ("aiohttp.", "miles_router.testing.")
        stage.defects[:] = [defect for defect in stage.defects if not defect.startswith(theirs)]


@pytest.mark.parametrize("place", range(len(ENTRANCES)), ids=lambda place: f"{place}:{ENTRANCES[place].path}")
async def test_every_field_with_every_odd_value_is_refused_by_name_or_judged_by_the_worker(place: int) -> None:
    async with target() as odd:
        entrance = (await odd.begin())[place]
        for what, body in itertools.islice(entrance.bodies(), place % THIN, None, THIN):
            await odd.judge(entrance, what, body)
        await odd.still_read()


@settings(max_examples=examples(60), phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(st.data())
async def test_no_sequence_of_odd_requests_breaks_anothers(data: st.DataObject) -> None:
    async with target() as odd:
        every = await odd.begin()
        for _ in range(data.draw(st.integers(1, 12))):
            entrance = every[data.draw(st.integers(0, len(every) - 1))]
            fields = data.draw(st.lists(st.sampled_from([(), *entrance.fields]), min_size=1, max_size=3, unique=True))
            values = {field: data.draw(st.sampled_from(VALUES)) for field in fields if not entrance.is_work(field)}
            await odd.judge(entrance, str(values)[:300], entrance.with_odd(values))
        await odd.still_read()
