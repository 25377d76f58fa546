"""Images, documents and the like in sessions: refused, or replaced by a fixed text, by the run's and the contract's
policy. An episode that has begun goes on."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import pytest

from miles_router.errors import ConfigError
from tests.support.bare_calls import MESSAGES, RESPONSES, request
from tests.support.session_trial import CHAT, SessionTrial, qwen3, simulated_sessions, user
from tests.support.stage import Stage

PNG = "aGk="
SCRIPT: Any = [{"calls": [{"name": "get_date", "arguments": {"zone": "UTC"}}]}, {"text": "Seen."}, {"text": "Done."}]
#: Parts that are no text, by API, and the text in their place.
MEDIA: dict[tuple[str, str], tuple[Any, str]] = {
    (CHAT, "image"): ({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}, "[image omitted]"),
    (CHAT, "audio"): ({"type": "input_audio", "input_audio": {"data": PNG, "format": "wav"}}, "[audio omitted]"),
    (CHAT, "file"): (
        {"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PNG}"}},
        "[file omitted]",
    ),
    (MESSAGES, "image"): (
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
        "[image omitted]",
    ),
    (MESSAGES, "pdf"): (
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": PNG}},
        "[document omitted]",
    ),
    (MESSAGES, "url"): ({"type": "document", "source": {"type": "url", "url": "http://x/a.pdf"}}, "[document omitted]"),
    (RESPONSES, "image"): ({"type": "input_image", "image_url": "http://x/a.png"}, "[image omitted]"),
    (RESPONSES, "file"): ({"type": "input_file", "file_id": "file-1"}, "[file omitted]"),
}
TEXT = b64encode(b"Words.").decode()
#: Parts that are text, by API.
TEXTS: dict[tuple[str, str], tuple[Any, str]] = {
    (CHAT, "file"): ({"type": "file", "file": {"file_data": f"data:text/plain;base64,{TEXT}"}}, "Words."),
    (MESSAGES, "document"): (
        {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "Words."}},
        "T\nWords.",
    ),
    (MESSAGES, "blocks"): (
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "Words."}]}},
        "Words.",
    ),
    (MESSAGES, "base64"): (
        {"type": "document", "source": {"type": "base64", "media_type": "text/markdown", "data": TEXT}},
        "Words.",
    ),
    (MESSAGES, "search result"): (
        {
            "type": "search_result",
            "title": "T",
            "source": "http://x",
            "content": [{"type": "text", "text": "Words."}],
            "citations": {"enabled": True},
        },
        "T\nhttp://x\nWords.",
    ),
    (RESPONSES, "file"): ({"type": "input_file", "file_data": f"data:text/csv;base64,{TEXT}"}, "Words."),
}


def said(path: str, part: Any) -> Any:
    """A user's message with a text and this part."""
    return {"role": "user", "content": [{"type": "input_text" if path == RESPONSES else "text", "text": "Look:"}, part]}


def result(path: str, answer: Any, part: Any) -> list[Any]:
    """An answer with a call, and its result, which is this part."""
    if path == CHAT:
        message = answer["choices"][0]["message"]
        return [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": [part]}]
    if path == RESPONSES:
        call_id = answer["output"][-1]["call_id"]
        return [*answer["output"], {"type": "function_call_output", "call_id": call_id, "output": [part]}]
    block = {"type": "tool_result", "tool_use_id": answer["content"][-1]["id"], "content": [part]}
    return [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [block]}]


def answered(path: str, answer: Any) -> list[Any]:
    if path == CHAT:
        return [answer["choices"][0]["message"]]
    return answer["output"] if path == RESPONSES else [{"role": "assistant", "content": answer["content"]}]


async def turn(trial: SessionTrial, session: str, path: str, items: list[Any]) -> Any:
    reply = await trial.ask("POST", f"/sessions/{session}{path}", request(path, items, stream=False))
    assert reply.status == 200, reply.body
    return reply.json()


async def prompt_of(trial: SessionTrial, session: str) -> str:
    (sample,) = await trial.samples(session)
    return qwen3().decode(sample["tokens"])


@pytest.mark.parametrize(("path", "kind"), MEDIA, ids=" ".join)
async def test_media_in_a_result_are_replaced_once_an_episode_has_begun(stage: Stage, path: str, kind: str) -> None:
    part, text = MEDIA[path, kind]
    async with simulated_sessions(stage, script=SCRIPT) as trial:
        session = await trial.create()
        items = [user("When?")]
        items += result(path, await turn(trial, session, path, items), part)
        items += [*answered(path, await turn(trial, session, path, items)), said(path, part)]
        await turn(trial, session, path, items)
        assert await trial.reasons(session) == [None, None, None]
        name = text.strip("[]").split()[0]
        marks = [record.get("media_replaced") for record in await trial.records(session)]
        assert marks == [None, {name: 1}, {name: 2}]
        assert (await prompt_of(trial, session)).count(text) == 2


@pytest.mark.parametrize(("path", "kind"), MEDIA, ids=" ".join)
async def test_media_in_a_first_turn_are_refused_and_the_setting_named(stage: Stage, path: str, kind: str) -> None:
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        asked = request(path, [said(path, MEDIA[path, kind][0])], stream=False)
        reply = await trial.ask("POST", f"/sessions/{session}{path}", asked)
        assert reply.status == 400
        assert "set media to 'replace'" in reply.json()["error"]["message"]
        assert await trial.records(session) == []
        assert not trial.worker.door.at(CHAT)


@pytest.mark.parametrize("by", ["run", "contract"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_replace_takes_media_in_a_first_turn(stage: Stage, path: str, by: str) -> None:
    part, text = MEDIA[path, "image"]
    async with simulated_sessions(stage, options={"media": "replace"} if by == "run" else {}) as trial:
        session = await trial.create(contract={"media": "replace"} if by == "contract" else None)
        await turn(trial, session, path, [said(path, part)])
        assert [record["media_replaced"] for record in await trial.records(session)] == [{"image": 1}]
        assert text in await prompt_of(trial, session)


@pytest.mark.parametrize("by", ["run", "contract"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_refuse_refuses_media_in_later_turns(stage: Stage, path: str, by: str) -> None:
    options = {"media": "refuse" if by == "run" else "replace"}
    async with simulated_sessions(stage, options=options, script=SCRIPT) as trial:
        session = await trial.create(contract={"media": "refuse"} if by == "contract" else None)
        items = [user("When?")]
        items += result(path, await turn(trial, session, path, items), MEDIA[path, "image"][0])
        reply = await trial.ask("POST", f"/sessions/{session}{path}", request(path, items, stream=False))
        assert reply.status == 400
        assert len(await trial.records(session)) == 1


@pytest.mark.parametrize(("path", "kind"), TEXTS, ids=" ".join)
async def test_documents_of_text_are_text(stage: Stage, path: str, kind: str) -> None:
    part, text = TEXTS[path, kind]
    async with simulated_sessions(stage, script=SCRIPT) as trial:
        session = await trial.create()
        items = [said(path, part)]
        items += result(path, await turn(trial, session, path, items), part)
        await turn(trial, session, path, items)
        assert await trial.reasons(session) == [None, None]
        assert all("media_replaced" not in record for record in await trial.records(session))
        prompt = await prompt_of(trial, session)
        assert prompt.count(text) == 2
        assert f"Look:\n{text}" in prompt or path == CHAT


async def test_a_policy_that_is_none_is_refused(stage: Stage) -> None:
    with pytest.raises(ConfigError, match="media: must be one of"):
        async with simulated_sessions(stage, options={"media": "drop"}):
            pass
    async with simulated_sessions(stage) as trial:
        answer = await trial.ask("POST", "/sessions", {"contract": {"media": "drop"}})
        assert (answer.status, b"contract.media" in answer.body) == (400, True)
