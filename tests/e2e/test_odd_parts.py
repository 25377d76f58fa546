"""Contents, results and nulls as agents' libraries write them: all text reaches the prompt, parts that SGLang refuses
end no episode, and what is left out is counted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.test_session_media import SCRIPT, TEXTS, answered, prompt_of, turn
from tests.support.bare_calls import MESSAGES, RESPONSES, request
from tests.support.session_trial import CHAT, SessionTrial, simulated_sessions, user
from tests.support.stage import Stage

COMPLETIONS = "/v1/completions"
APIS = (CHAT, MESSAGES, RESPONSES)
apis = pytest.mark.parametrize("path", APIS)
RESOURCE = {"type": "resource", "resource": {"uri": "file:///a", "mimeType": "text/plain", "text": "Words."}}
#: Contents of a user's message that are text in every API.
CONTENTS: dict[str, tuple[Any, str]] = {
    "strings": (["Words."], "Words."),
    "a part without a type": ([{"text": "Words."}], "Words."),
    "a part whose type is null": ([{"type": None, "text": "Words."}], "Words."),
    "a text that is null": ([{"type": "text", "text": None}, {"type": "text", "text": "Words."}], "Words."),
    "a resource": ([RESOURCE], "Words."),
    "a search result": ([TEXTS[MESSAGES, "search result"][0]], "T\nhttp://x\nWords."),
    "a document": ([TEXTS[MESSAGES, "document"][0]], "T\nWords."),
}
#: The same in chat, of parts that other APIs have.
CHAT_CONTENTS: dict[str, tuple[Any, str]] = {
    "input text": ([{"type": "input_text", "text": "Words."}], "Words."),
    "output text": ([{"type": "output_text", "text": "Words.", "annotations": []}], "Words."),
    "a refusal": ([{"type": "refusal", "refusal": "Words."}], "Words."),
}
#: What tools give back that is no text, and its text.
RESULTS: dict[str, tuple[Any, str]] = {
    "an object": ({"degrees": 21}, '{"degrees":21}'),
    "an object with a type of its own": ({"type": "error", "message": "Gone."}, '{"type":"error","message":"Gone."}'),
    "a number": (21.5, "21.5"),
    "false": (False, "false"),
    "numbers": ([1, 2], "[1,2]"),
    "objects": ([{"degrees": 21}], '[{"degrees":21}]'),
    "objects with a text and more": ([{"text": "Words.", "score": 1}], '[{"text":"Words.","score":1}]'),
    "strings": (["Words."], "Words."),
    "one part": ({"type": "text", "text": "Words."}, "Words."),
    "a resource": ([RESOURCE], "Words."),
}
#: Thinking that comes back in the history of a chat, each with the part beside it.
THOUGHTS: dict[str, dict[str, Any]] = {
    "thinking": {"type": "thinking", "thinking": "Hm.", "signature": "s"},
    "reasoning": {"type": "reasoning", "text": "Hm."},
    "reasoning under its own name": {"type": "reasoning", "reasoning": "Hm."},
    "both names": {"type": "thinking", "thinking": "Hm.", "text": "Hm."},
    "null": {"type": "thinking", "thinking": None, "signature": "s"},
    "redacted": {"type": "redacted_thinking", "data": "abc"},
}
#: Fields of chat and completions that SGLang refuses as null.
NULLS = dict.fromkeys(
    (
        *("model", "n", "stream", "logprobs", "frequency_penalty", "presence_penalty", "parallel_tool_calls", "echo"),
        *("max_tokens", "temperature", "top_p", "skip_special_tokens", "ignore_eos", "stream_options", "stop"),
    )
)


def with_result(path: str, answer: Any, content: Any) -> list[Any]:
    """An answer with a call, and its result with this content."""
    if path == CHAT:
        message = answer["choices"][0]["message"]
        return [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": content}]
    if path == RESPONSES:
        call_id = answer["output"][-1]["call_id"]
        return [*answer["output"], {"type": "function_call_output", "call_id": call_id, "output": content}]
    block = {"type": "tool_result", "tool_use_id": answer["content"][-1]["id"], "content": content}
    return [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [block]}]


async def refused(trial: SessionTrial, session: str, path: str, items: list[Any]) -> str:
    """The reason of a 400 that has recorded nothing and asked no engine."""
    before, asked = await trial.records(session), len(trial.door)
    reply = await trial.ask("POST", f"/sessions/{session}{path}", request(path, items, stream=False))
    assert reply.status == 400, reply.body
    assert (await trial.records(session), len(trial.door)) == (before, asked)
    return str(reply.json()["error"]["message"])


@pytest.mark.parametrize(
    ("path", "kind"),
    [(path, kind) for path in APIS for kind in CONTENTS] + [(CHAT, kind) for kind in CHAT_CONTENTS],
    ids=" ".join,
)
async def test_contents_of_text_reach_the_prompt_in_one_segment(stage: Stage, path: str, kind: str) -> None:
    content, text = {**CONTENTS, **CHAT_CONTENTS}[kind]
    async with simulated_sessions(stage, script=[{"text": "Seen."}]) as trial:
        session = await trial.create()
        items: list[Any] = [{"role": "user", "content": content}]
        items += [*answered(path, await turn(trial, session, path, items)), {"role": "user", "content": content}]
        await turn(trial, session, path, items)
        assert await trial.reasons(session) == [None, None]
        assert (await prompt_of(trial, session)).count(f"{text}<|im_end|>") == 2
        assert all("media_replaced" not in record for record in await trial.records(session))


@apis
async def test_a_text_that_is_missing_is_refused(stage: Stage, path: str) -> None:
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        asked = request(path, [{"role": "user", "content": [{"type": "text"}]}], stream=False)
        reply = await trial.ask("POST", f"/sessions/{session}{path}", asked)
        assert reply.status == 400, reply.body
        assert await trial.records(session) == []


@apis
async def test_a_user_s_content_that_is_null_is_empty(stage: Stage, path: str) -> None:
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        await turn(trial, session, path, [{"role": "user", "content": None}])
        assert "<|im_start|>user\n<|im_end|>" in await prompt_of(trial, session)


@apis
@pytest.mark.parametrize("kind", RESULTS)
async def test_results_that_are_no_text_are_their_json(stage: Stage, path: str, kind: str) -> None:
    content, text = RESULTS[kind]
    async with simulated_sessions(stage, script=SCRIPT) as trial:
        session = await trial.create()
        items = [user("When?")]
        items += with_result(path, await turn(trial, session, path, items), content)
        items += [*answered(path, await turn(trial, session, path, items)), user("And now?")]
        await turn(trial, session, path, items)
        assert await trial.reasons(session) == [None, None, None]
        assert (await prompt_of(trial, session)).count(f"<tool_response>\n{text}\n</tool_response>") == 1


@apis
async def test_a_result_that_is_null_is_empty(stage: Stage, path: str) -> None:
    async with simulated_sessions(stage, script=SCRIPT) as trial:
        session = await trial.create()
        items = [user("When?")]
        items += with_result(path, await turn(trial, session, path, items), None)
        await turn(trial, session, path, items)
        assert await trial.reasons(session) == [None, None]
        assert "<tool_response>\n\n</tool_response>" in await prompt_of(trial, session)


@apis
async def test_a_part_of_an_unknown_type_follows_the_policy_for_media(stage: Stage, path: str) -> None:
    part = {"type": "hologram", "hologram": "abc"}
    async with simulated_sessions(stage, script=SCRIPT) as trial:
        session = await trial.create()
        said = {"role": "user", "content": [part]}
        assert "set media to 'replace'" in await refused(trial, session, path, [said])
        items = [user("When?")]
        items += with_result(path, await turn(trial, session, path, items), [part])
        items += [*answered(path, await turn(trial, session, path, items)), said]
        await turn(trial, session, path, items)
        assert await trial.reasons(session) == [None, None, None]
        marks = [record.get("media_replaced") for record in await trial.records(session)]
        assert marks == [None, {"content": 1}, {"content": 2}]
        assert (await prompt_of(trial, session)).count("[content omitted]") == 2


@pytest.mark.parametrize("kind", THOUGHTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_in_a_chat_s_history_keeps_the_segment(stage: Stage, kind: str, stream: bool) -> None:
    script = [{"text": "Seen.", "reasoning": "Hm."}] * 3
    async with simulated_sessions(stage, script=script, reasoning_parser="qwen3") as trial:
        session = await trial.create()
        messages = [user("Hi")]
        for _ in range(3):
            if stream:
                await trial.stream(session, messages, max_tokens=64)
            else:
                await trial.chat(session, messages, max_tokens=64)
            said = {"role": "assistant", "content": [THOUGHTS[kind], {"type": "text", "text": "Seen."}]}
            messages += [said, user("Go on.")]
        assert await trial.reasons(session) == [None, None, None]
        assert len(await trial.samples(session)) == 1


async def test_thinking_of_a_summary_alone_is_left_out_and_counted(stage: Stage) -> None:
    part = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
    async with simulated_sessions(stage, script=[{"text": "Seen."}]) as trial:
        session = await trial.create()
        await trial.chat(session, [user("Hi")])
        said = {"role": "assistant", "content": [part, {"type": "text", "text": "Seen."}]}
        await trial.chat(session, [user("Hi"), said, user("Go on.")])
        assert await trial.reasons(session) == [None, None]
        assert (await trial.records(session))[1]["media_replaced"] == {"content": 1}


async def test_thinking_reaches_a_prompt_that_the_engine_renders(stage: Stage) -> None:
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        said = {"role": "assistant", "content": [THOUGHTS["both names"], {"type": "text", "text": "Seen."}]}
        await trial.chat(session, [user("Hi"), said, user("Go on.")])
        (visit,) = trial.door
        assert visit.json()["messages"][1]["content"][0] == {"type": "thinking", "thinking": "Hm."}


@pytest.mark.parametrize("kind", ["web_search_call", "mcp_call", "x_new_item"])
async def test_other_items_of_responses_are_left_out_and_counted(stage: Stage, kind: str) -> None:
    item = {"type": kind, "id": "ws_1", "status": "completed"}
    async with simulated_sessions(stage, script=[{"text": "Seen."}]) as trial:
        session = await trial.create()
        assert "set media to 'replace'" in await refused(trial, session, RESPONSES, [item, user("Hi")])
        items = [user("Hi")]
        items += [*(await turn(trial, session, RESPONSES, items))["output"], item, user("Go on.")]
        items += [*(await turn(trial, session, RESPONSES, items))["output"], user("Go on.")]
        await turn(trial, session, RESPONSES, items)
        assert await trial.reasons(session) == [None, None, None]
        marks = [record.get("media_replaced") for record in await trial.records(session)]
        assert marks == [None, {"content": 1}, {"content": 1}]


@pytest.mark.parametrize("kind", ["text", "summary_text", "reasoning_text"])
async def test_reasoning_of_responses_may_have_parts_of_other_names(stage: Stage, kind: str) -> None:
    item = {"type": "reasoning", "summary": [], "content": [{"type": kind, "text": "Hm."}]}
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        said = {"role": "assistant", "content": [{"type": "output_text", "text": "Seen."}]}
        await turn(trial, session, RESPONSES, [user("Hi"), item, said, user("Go on.")])
        (record,) = await trial.records(session)
        (visit,) = trial.door
        assert visit.json()["messages"][1]["reasoning_content"] == "Hm."
        assert "media_replaced" not in record


async def test_an_empty_previous_response_id_is_not_given(stage: Stage) -> None:
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        asked = {**request(RESPONSES, [user("Hi")], stream=False), "previous_response_id": ""}
        reply = await trial.ask("POST", f"/sessions/{session}{RESPONSES}", asked)
        assert reply.status == 200, reply.body


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (path, name)
        for path in (CHAT, COMPLETIONS, MESSAGES, RESPONSES)
        for name in NULLS
        if (path, name) not in {(MESSAGES, "model"), (MESSAGES, "max_tokens"), (RESPONSES, "model")}  # required there
    ],
)
async def test_null_is_not_given(stage: Stage, path: str, name: str) -> None:
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        asked = {"model": "m", "prompt": "Hi"} if path == COMPLETIONS else request(path, [user("Hi")], stream=False)
        reply = await trial.ask("POST", f"/sessions/{session}{path}", {**asked, name: None})
        assert reply.status == 200, reply.body
        assert len(await trial.records(session)) == 1


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_every_null_of_a_stream_is_not_given(stage: Stage, path: str) -> None:
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        named = {"prompt": "Hi"} if path == COMPLETIONS else {"messages": [user("Hi")], "tools": None}
        reply = await trial.ask("POST", f"/sessions/{session}{path}", {**NULLS, **named, "stream": True})
        assert reply.status == 200, reply.body
        assert reply.body.endswith(b"data: [DONE]\n\n")
        assert len(await trial.records(session)) == 1


@apis
async def test_a_byte_order_mark_before_a_body_is_skipped(stage: Stage, path: str) -> None:
    async with simulated_sessions(stage, script=[{"text": "Seen."}]) as trial:
        session = await trial.create()
        items = [user("Hi")]
        for _ in range(2):
            body = b"\xef\xbb\xbf" + json.dumps(request(path, items, stream=False)).encode()
            reply = await trial.ask("POST", f"/sessions/{session}{path}", body)
            assert reply.status == 200, reply.body
            items += [*answered(path, reply.json()), user("Go on.")]
        assert await trial.reasons(session) == [None, None]
