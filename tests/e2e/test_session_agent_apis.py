"""An API that the package does not know: one class and a line in the table, and its turns are traced exactly, whole and
streamed, continued in ids, and refused in its own words."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import orjson
import pytest

import middleware_hub.openai_session_middleware as middleware
from middleware_hub.openai_session.agent_apis import AGENT_APIS
from middleware_hub.openai_session.agent_apis.agent_api import ReplyWriter
from middleware_hub.openai_session.agent_apis.chat import ChatApi
from middleware_hub.openai_session.sessions.agent_request import AgentRequest
from miles_router.engines.events import Event, write_event
from miles_router.errors import BadRequest
from tests.support.http import RawReply
from tests.support.session_trial import SessionTrial, exactly, simulated_sessions, user
from tests.support.stage import Stage

PATH = "/v1/questions"


class QuestionWriter(ReplyWriter):
    """`{"answer", "end"}`, or an event for each text and one for the end."""

    def write_answer(self, answer: dict[str, Any]) -> object:
        (choice,) = answer["choices"]
        return {"answer": choice["message"]["content"], "end": choice["finish_reason"]}

    def write_chunk(self, chunk: dict[str, Any], name: bytes) -> bytes:
        return b"".join(map(self._event, chunk["choices"]))

    def _event(self, choice: Mapping[str, Any]) -> bytes:
        text = choice["delta"].get("content")
        said = write_event({"text": text}, b"text") if text else b""
        return said + (write_event({"end": choice["finish_reason"]}, b"end") if choice["finish_reason"] else b"")

    def write_other(self, event: Event) -> bytes:
        return b"" if event.is_last else event.raw

    def write_refusal(self, body: bytes, status: int) -> bytes:
        return orjson.dumps({"refused": orjson.loads(body)["message"]})


class QuestionApi(ChatApi):
    """`{"talk": [question, answer, ..., question], "live"}`: texts that take turns."""

    path = PATH

    def fields(self, request: object) -> Mapping[str, Any]:
        if not isinstance(request, Mapping) or not isinstance(request.get("talk"), list):
            raise BadRequest("talk must be a list of texts")
        roles = ("user", "assistant")
        messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(request["talk"])]
        return {"model": "m", "messages": messages, "max_tokens": 6, "stream": bool(request.get("live"))}

    def writer(self, turn: AgentRequest) -> ReplyWriter:
        return QuestionWriter()


@pytest.fixture(autouse=True)
def third_api(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "AGENT_APIS", (*AGENT_APIS, QuestionApi))


@pytest.fixture
async def trial(stage: Stage) -> AsyncIterator[SessionTrial]:
    async with simulated_sessions(stage) as made:
        yield made


async def question(trial: SessionTrial, session: str, *talk: str, **fields: Any) -> RawReply:
    return await trial.ask("POST", f"/sessions/{session}{PATH}?beta=true", {"talk": talk, **fields})


def events_of(body: bytes) -> list[tuple[bytes, Any]]:
    """Name and content of each event."""
    *raw, rest = body.split(b"\n\n")
    assert rest == b""
    return [(event.name, event.parse()) for event in map(Event.read, raw)]


def text_of(body: bytes) -> str:
    return "".join(content["text"] for name, content in events_of(body) if name == b"text")


async def test_an_api_that_is_one_class_is_traced_exactly(trial: SessionTrial) -> None:
    session = await trial.create()
    first = (await question(trial, session, "Hi")).json()
    assert (set(first), first["end"]) == ({"answer", "end"}, "length")
    live = await question(trial, session, "Hi", first["answer"], "Go on", live=True)
    assert live.value("content-type") == b"text/event-stream; charset=utf-8"
    text = text_of(live.body)
    last = (await question(trial, session, "Hi", first["answer"], "Go on", text, "And?")).json()
    one, two, three = (exchange.generation for exchange in trial.log)
    assert [one.text, two.text, three.text] == [first["answer"], text, last["answer"]]
    assert ["input_ids" in exchange.json() for exchange in trial.log] == [False, True, True]
    (sample,) = await trial.samples(session)
    exactly(sample, one, two, three)
    records = await trial.records(session)
    assert [record["path"] for record in records] == [PATH] * 3
    assert [record["versions"] for record in records] == ["engine"] * 3


async def test_its_turns_are_those_of_every_api(trial: SessionTrial) -> None:
    session = await trial.create()
    answer = (await question(trial, session, "Hi")).json()["answer"]
    await trial.chat(session, [user("Hi"), {"role": "assistant", "content": answer}, user("Go on")])
    assert [record["parent"] for record in await trial.records(session)] == [None, 0]
    same = [("X-Turn-Id", "t")]
    asked = {"talk": ["Hi"], "live": True}
    replies = [await trial.ask("POST", f"/sessions/{session}{PATH}", asked, same) for _ in range(2)]
    assert replies[0].body == replies[1].body
    assert len(await trial.records(session)) == 3
    refused = await trial.ask("POST", f"/sessions/{session}{PATH}", {"talk": 3})
    assert (refused.status, refused.error_type) == (400, "invalid_request")
    long = await question(trial, session, "word " * 60_000)
    assert (long.status, [*long.json()]) == (400, ["refused"]), "the engine's refusal comes in its own words"
