"""Contents, results, media and nulls as agents' libraries write them: all text reaches the prompt; what is no text is
refused or replaced by a fixed text, by the run's and the contract's policy; what is left out is counted."""

from __future__ import annotations

import itertools
import json
from base64 import b64encode
from typing import Any

import pytest

from miles_router.errors import ConfigError
from tests.support.bare_calls import NAMES
from tests.support.http import RawReply
from tests.support.session_apis import BOTH, COMPLETIONS, MESSAGES, PLAIN, RESPONSES, TALKS, Api, case
from tests.support.session_trial import CHAT, SessionTrial, prompt_of, qwen3, simulated_sessions, user
from tests.support.stage import Stage

PNG, TEXT = "aGk=", b64encode(b"Words.").decode()
SCRIPT: Any = [{"calls": [{"name": "get_date", "arguments": {"zone": "UTC"}}]}, "Seen.", "Done."]
IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}


def document(**source: Any) -> dict[str, Any]:
    return {"type": "document", "source": source}


#: Parts that are no text, by API, and the text in their place.
MEDIA: dict[str, list[tuple[Any, str]]] = {
    CHAT: [
        (IMAGE, "[image omitted]"),
        ({"type": "input_audio", "input_audio": {"data": PNG, "format": "wav"}}, "[audio omitted]"),
        (
            {"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PNG}"}},
            "[file omitted]",
        ),
        ({"type": "hologram", "hologram": "abc"}, "[content omitted]"),
    ],
    MESSAGES: [
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}, "[image omitted]"),
        (document(type="base64", media_type="application/pdf", data=PNG), "[document omitted]"),
        (document(type="url", url="http://x/a.pdf"), "[document omitted]"),
        ({"type": "hologram", "hologram": "abc"}, "[content omitted]"),
    ],
    RESPONSES: [
        ({"type": "input_image", "image_url": "http://x/a.png"}, "[image omitted]"),
        ({"type": "input_file", "file_id": "file-1"}, "[file omitted]"),
        ({"type": "hologram", "hologram": "abc"}, "[content omitted]"),
    ],
}
RESOURCE = {"type": "resource", "resource": {"uri": "file:///a", "mimeType": "text/plain", "text": "Words."}}
DOCUMENT = {**document(type="text", media_type="text/plain", data="Words."), "title": "T"}
FOUND = {
    "type": "search_result",
    "title": "T",
    "source": "http://x",
    "content": [{"type": "text", "text": "Words."}],
    "citations": {"enabled": True},
}
#: Contents of a user's message that are text in every API, and those of one.
CONTENTS: list[tuple[Any, str]] = [
    (["Words."], "Words."),
    ([{"text": "Words."}], "Words."),
    ([{"type": None, "text": "Words."}], "Words."),
    ([{"type": "text", "text": None}, {"type": "text", "text": "Words."}], "Words."),
    ([RESOURCE], "Words."),
    ([FOUND], "T\nhttp://x\nWords."),
    ([DOCUMENT], "T\nWords."),
]
OWN_CONTENTS: dict[str, list[tuple[Any, str]]] = {
    CHAT: [
        ([{"type": "input_text", "text": "Words."}], "Words."),
        ([{"type": "output_text", "text": "Words.", "annotations": []}], "Words."),
        ([{"type": "refusal", "refusal": "Words."}], "Words."),
        ([{"type": "file", "file": {"file_data": f"data:text/plain;base64,{TEXT}"}}], "Words."),
    ],
    MESSAGES: [
        ([document(type="content", content=[{"type": "text", "text": "Words."}])], "Words."),
        ([document(type="base64", media_type="text/markdown", data=TEXT)], "Words."),
    ],
    RESPONSES: [([{"type": "input_file", "file_data": f"data:text/csv;base64,{TEXT}"}], "Words.")],
}
#: What tools give back that is no text, and its text.
RESULTS: list[tuple[Any, str]] = [
    ({"degrees": 21}, '{"degrees":21}'),
    ({"type": "error", "message": "Gone."}, '{"type":"error","message":"Gone."}'),
    (21.5, "21.5"),
    (False, "false"),
    ([1, 2], "[1,2]"),
    ([{"degrees": 21}], '[{"degrees":21}]'),
    ([{"text": "Words.", "score": 1}], '[{"text":"Words.","score":1}]'),
    (["Words."], "Words."),
    ({"type": "text", "text": "Words."}, "Words."),
    ([RESOURCE], "Words."),
    ([DOCUMENT], "T\nWords."),
    (None, ""),
]
#: Thinking that comes back in the history of a chat, each with the part beside it.
THOUGHTS: list[dict[str, Any]] = [
    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
    {"type": "reasoning", "text": "Hm."},
    {"type": "reasoning", "reasoning": "Hm."},
    {"type": "thinking", "thinking": "Hm.", "text": "Hm."},
    {"type": "thinking", "thinking": None, "signature": "s"},
    {"type": "redacted_thinking", "data": "abc"},
]
#: Fields of chat and completions that SGLang refuses as null.
NULLS = dict.fromkeys(
    (
        *("model", "n", "stream", "logprobs", "frequency_penalty", "presence_penalty", "parallel_tool_calls", "echo"),
        *("max_tokens", "temperature", "top_p", "skip_special_tokens", "ignore_eos", "stream_options", "stop"),
    )
)
REQUIRED = {(MESSAGES, "model"), (MESSAGES, "max_tokens"), (RESPONSES, "model")}


async def with_result(trial: SessionTrial, session: str, api: Api, content: Any) -> list[Any]:
    """A history whose last item is a result with this content."""
    items = [user("When?")]
    said = await api.turn(trial, session, items, tools=api.tools(*NAMES))
    return [*items, *said.items, *api.results((said.calls[0][0], content))]


async def test_media_are_replaced_once_an_episode_has_begun_and_refused_before(stage: Stage) -> None:
    async with simulated_sessions(stage, script=SCRIPT) as trial:
        for api, part, text in ((each, *media) for each in TALKS for media in MEDIA[each.path]):
            with case(api, part):
                session = await trial.create()
                error = await api.refused(trial, session, [api.says("Look:", part)])
                assert "set media to 'replace'" in error["message"]
                items = await with_result(trial, session, api, [part])
                items += (await api.turn(trial, session, items, tools=api.tools(*NAMES))).items
                await api.turn(trial, session, [*items, api.says("Look:", part)], tools=api.tools(*NAMES))
                assert await trial.reasons(session) == [None, None, None]
                name = text.strip("[]").split()[0]
                marks = [record.get("media_replaced") for record in await trial.records(session)]
                assert marks == [None, {name: 1}, {name: 2}]
                assert (await prompt_of(trial, session)).count(text) == 2


async def test_the_policy_is_the_contract_s_before_the_run_s(stage: Stage) -> None:
    for run, contract in (("replace", None), (None, "replace"), ("refuse", None), ("replace", "refuse")):
        async with simulated_sessions(stage, options={"media": run} if run else {}, script=SCRIPT) as trial:
            for api in TALKS:
                with case(run, contract, api):
                    (part, text), *_ = MEDIA[api.path]
                    session = await trial.create(contract={"media": contract} if contract else None)
                    if "refuse" in (run, contract):
                        await api.refused(trial, session, await with_result(trial, session, api, [part]))
                    else:
                        await api.turn(trial, session, [api.says("Look:", part)])
                        assert [record["media_replaced"] for record in await trial.records(session)] == [{"image": 1}]
                        assert text in await prompt_of(trial, session)
            answer = await trial.ask("POST", "/sessions", {"contract": {"media": "drop"}})
            assert (answer.status, b"contract.media" in answer.body) == (400, True)
    with pytest.raises(ConfigError, match="media: must be one of"):
        async with simulated_sessions(stage, options={"media": "drop"}):
            pass


async def test_an_image_is_refused_in_a_session_alone(stage: Stage) -> None:
    async with simulated_sessions(stage) as trial:
        body = Api(CHAT).body([Api(CHAT).says("See:", IMAGE)])
        assert b"image_url" in (await Api(CHAT, named=True).post(trial, "other", body)).body
        assert trial.log == []
        await trial.ask("POST", CHAT, body)
        assert trial.log[-1].json() == body


async def test_contents_of_text_reach_the_prompt_in_one_segment(stage: Stage) -> None:
    async with simulated_sessions(stage, script=["Seen."]) as trial:
        for api, content, text in ((each, *said) for each in TALKS for said in [*CONTENTS, *OWN_CONTENTS[each.path]]):
            with case(api, content):
                session, asked = await trial.create(), {"role": "user", "content": content}
                said = await api.turn(trial, session, [asked])
                await api.turn(trial, session, [asked, *said.items, asked], 4)
                assert await trial.reasons(session) == [None, None]
                assert (await prompt_of(trial, session)).count(f"{text}<|im_end|>") == 2
                assert all("media_replaced" not in record for record in await trial.records(session))
        for api in TALKS:
            with case(api):
                session = await trial.create()
                reply = await api.post(trial, session, api.body([{"role": "user", "content": [{"type": "text"}]}]))
                assert reply.status == 400, "the text is missing"
                await api.turn(trial, session, [{"role": "user", "content": None}])
                assert "<|im_start|>user\n<|im_end|>" in await prompt_of(trial, session)


async def test_results_that_are_no_text_are_their_json(stage: Stage) -> None:
    async with simulated_sessions(stage, script=SCRIPT) as trial:
        for api, (content, text) in itertools.product(TALKS, RESULTS):
            with case(api, content):
                session = await trial.create()
                items = await with_result(trial, session, api, content)
                items += (await api.turn(trial, session, items, tools=api.tools(*NAMES))).items
                await api.turn(trial, session, [*items, user("And now?")], tools=api.tools(*NAMES))
                assert await trial.reasons(session) == [None, None, None]
                assert (await prompt_of(trial, session)).count(f"<tool_response>\n{text}\n</tool_response>") == 1


async def test_thinking_in_a_chat_s_history_keeps_the_segment(stage: Stage) -> None:
    async with simulated_sessions(stage, script=[{"text": "Seen.", "reasoning": "Hm."}] * 3) as trial:
        for thought, stream in itertools.product(THOUGHTS, BOTH):
            with case(thought, stream):
                session, messages = await trial.create(), [user("Hi")]
                said = {"role": "assistant", "content": [thought, {"type": "text", "text": "Seen."}]}
                for _ in range(3):
                    await Api(CHAT).turn(trial, session, messages, stream=stream)
                    messages += [said, user("Go on.")]
                assert await trial.reasons(session) == [None, None, None]
        # A summary alone is left out and counted; a prompt that the engine renders has the thought.
        session = await trial.create()
        part = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
        await trial.chat(session, [user("Hi")], max_tokens=64)
        said = {"role": "assistant", "content": [part, {"type": "text", "text": "Seen."}]}
        await trial.chat(session, [user("Hi"), said, user("Go on.")])
        assert (await trial.records(session))[1]["media_replaced"] == {"content": 1}
        said = {"role": "assistant", "content": [THOUGHTS[3], {"type": "text", "text": "Seen."}]}
        await trial.chat(await trial.create(), [user("Hi"), said, user("Go on.")])
        assert trial.log[-1].json()["messages"][1]["content"][0] == {"type": "thinking", "thinking": "Hm."}


async def test_other_items_of_responses_are_left_out_and_counted(stage: Stage) -> None:
    api = Api(RESPONSES)
    async with simulated_sessions(stage, script=["Seen."]) as trial:
        for kind in ("web_search_call", "mcp_call", "x_new_item"):
            with case(kind):
                session = await trial.create()
                item: Any = {"type": kind, "id": "ws_1", "status": "completed"}
                error = await api.refused(trial, session, [item, user("Hi")])
                assert "set media to 'replace'" in error["message"]
                items = [user("Hi")]
                items += [*(await api.turn(trial, session, items)).items, item, user("Go on.")]
                items += [*(await api.turn(trial, session, items, 4)).items, user("Go on.")]
                await api.turn(trial, session, items, 4)
                assert await trial.reasons(session) == [None, None, None]
                marks = [record.get("media_replaced") for record in await trial.records(session)]
                assert marks == [None, {"content": 1}, {"content": 1}]
        for kind in ("text", "summary_text", "reasoning_text"):
            with case("reasoning of", kind):
                item = {"type": "reasoning", "summary": [], "content": [{"type": kind, "text": "Hm."}]}
                said = {"role": "assistant", "content": [{"type": "output_text", "text": "Seen."}]}
                await api.turn(trial, await trial.create(), [user("Hi"), item, said, user("Go on.")], 4)
                assert trial.log[-1].json()["messages"][1]["reasoning_content"] == "Hm."


async def test_null_is_not_given(stage: Stage) -> None:
    async with simulated_sessions(stage, script=["Seen."]) as trial:
        for api in PLAIN:
            items: Any = "Hi" if api.path == COMPLETIONS else [user("Hi")]
            for name in NULLS:
                if (api.path, name) not in REQUIRED:
                    with case(api, name):
                        session = await trial.create()
                        reply = await api.post(trial, session, {**api.body(items, 4), name: None})
                        assert reply.status == 200, reply.body
                        assert len(await trial.records(session)) == 1
            if api.path in (CHAT, COMPLETIONS):
                session, body = await trial.create(), api.body(items)
                nulls = {**body, **NULLS, "stream": True, **({"tools": None} if api.path == CHAT else {})}
                reply = await api.post(trial, session, nulls)
                assert (reply.status, reply.body[-14:]) == (200, b"data: [DONE]\n\n"), api
                assert len(await trial.records(session)) == 1
        assert (await Api(RESPONSES).ask(trial, session, 4, previous_response_id="")).status == 200


async def test_a_byte_order_mark_before_a_body_is_skipped(stage: Stage) -> None:
    async with simulated_sessions(stage, script=["Seen."]) as trial:
        for api in TALKS:
            session, items = await trial.create(), [user("Hi")]
            for _ in range(2):
                body = b"\xef\xbb\xbf" + json.dumps(api.body(items, 4)).encode()
                items += [*api.read(await api.post(trial, session, body), stream=False).items, user("Go on.")]
            assert await trial.reasons(session) == [None, None], api


APIS = (Api(MESSAGES), Api(RESPONSES))
#: Fields that say nothing, at any depth.
NOTHING: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        {"x_new": None},
        {"x_new": False},
        {"metadata": {str(number): "v" for number in range(40)}},
        {"response_format": None, "stop": None, "tools": None, "tool_choice": None, "reasoning": None},
    ],
    MESSAGES: [
        {"x_new": None},
        {"x_new": False},
        {"output_config": {"effort": None, "format": None, "x_new": None}},
        {"tools": [{"name": "a", "input_schema": {}, "x_new": False, "strict": None, "defer_loading": None}]},
        {"metadata": {str(number): "v" for number in range(40)}},
        {"thinking": None, "tool_choice": None, "system": None, "stop_sequences": None, "container": None},
    ],
    RESPONSES: [
        {"x_new": None},
        {"x_new": False},
        {"text": {"format": None, "verbosity": None}},
        {"text": None, "reasoning": {"effort": None}, "include": None, "conversation": None, "tool_choice": None},
        {"metadata": {str(number): "v" for number in range(40)}},
        {"metadata": {"a": None}},
        {"tools": [{"type": "function", "name": "a", "parameters": None, "strict": None, "x_new": 1}]},
    ],
}
#: Fields that say something, and what they are called.
SOMETHING: dict[str, list[tuple[dict[str, Any], str]]] = {
    MESSAGES: [
        ({"x_new": 1}, "x_new"),
        ({"x_new": {}}, "x_new"),
        ({"output_config": {"x_new": "a"}}, "output_config.x_new"),
        ({"tools": [{"name": "a", "input_schema": {}, "x_new": True}]}, "tools.0.x_new"),
    ],
    RESPONSES: [
        ({"x_new": 1}, "x_new"),
        ({"x_new": []}, "x_new"),
        ({"include": ["x_call.results"]}, "include.x_call.results"),
        ({"include": ["reasoning.encrypted_content", "x_call.results"]}, "include.x_call.results"),
    ],
}


async def ask(trial: SessionTrial, session: str, api: Api, fields: dict[str, Any]) -> RawReply:
    return await api.post(trial, session, {**api.body([user("Hi")], 4), **fields})


async def test_fields_without_a_value_are_not_given(stage: Stage) -> None:
    async with simulated_sessions(stage) as trial:
        for api in TALKS:
            for fields in NOTHING[api.path]:
                with case(api, fields):
                    session = await trial.create()
                    reply = await ask(trial, session, api, fields)
                    assert reply.status == 200, reply.body
                    (record,) = await trial.records(session)
                    assert "unknown_fields" not in record
        contract = {"budget": {"max_turns": 1, "max_tokens": None}, "key": None, "media": None, "model": {"name": None}}
        assert (await ask(trial, await trial.create(contract=contract), Api(CHAT), {})).status == 200


async def test_a_field_with_a_value_is_refused_by_name_or_recorded(stage: Stage) -> None:
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        for api in APIS:
            for fields, name in SOMETHING[api.path]:
                with case(api, fields):
                    error = await api.refused(trial, session, [user("Hi")], **fields)
                    assert name.removeprefix("include.") in error["message"]
                    assert "unknown_fields" in error["message"]
    async with simulated_sessions(stage, options={"unknown_fields": "record"}) as trial:
        for api in APIS:
            session = await trial.create()
            for fields, _ in SOMETHING[api.path]:
                reply = await ask(trial, session, api, fields)
                assert reply.status == 200, (api, fields, reply.body)
            many = {f"x_{number:04}" + "y" * 200: 1 for number in range(500)}
            assert (await ask(trial, session, api, many)).status == 200
            *names, bounded = [record["unknown_fields"] for record in await trial.records(session)]
            assert names == [[name] for _, name in SOMETHING[api.path]], api
            assert (len(bounded), max(map(len, bounded))) == (32, 64)


async def test_metadata_of_responses_is_said_again_and_bounded(stage: Stage) -> None:
    api, key = Api(RESPONSES), "k" * 300
    values = [("v" * 100_000, "v" * 100_000), (7, "7"), (True, "true"), ({"a": [1]}, '{"a":[1]}'), ("", "")]
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        for (value, text), stream in itertools.product(values, BOTH):
            with case(text[:10], stream):
                reply = await ask(trial, session, api, {"metadata": {key: value, "b": None}, "stream": stream})
                answer = api.answers(reply, stream=stream)[-1]
                answer = answer.get("response", answer)
                stored = await trial.ask("GET", f"/sessions/{session}/v1/responses/{answer['id']}")
                assert answer["metadata"] == stored.json()["metadata"] == {key: text}
        long = "v" * (1 << 20)
        for metadata in ({"a": long}, {long: "a"}, {"a": [long]}):
            assert (await api.refused(trial, session, [user("Hi")], metadata=metadata))["param"] == "metadata"


async def prompts(trial: SessionTrial, session: str) -> str:
    return "".join(qwen3().decode(sample["tokens"]) for sample in await trial.samples(session))


async def test_tools_of_one_name_are_one_tool_or_refused_in_a_first_turn(stage: Stage) -> None:
    async with simulated_sessions(stage) as trial:
        for api in APIS:
            (one,), (other,) = (api.tools("add", description=text) for text in ("Adds.", "Adds more."))
            session = await trial.create()
            assert (await ask(trial, session, api, {"tools": [one, one]})).status == 200
            assert (await prompts(trial, session)).count('"Adds."') == 1, api
            session = await trial.create()
            assert "'add'" in (await api.refused(trial, session, [user("Hi")], tools=[one, other]))["message"]
            for tools in ([one], [one, other]):
                assert (await ask(trial, session, api, {"tools": tools})).status == 200
            left_out = [record.get("tools_left_out") for record in await trial.records(session)]
            assert left_out == [None, ["add"]], api
            assert "Adds more." not in await prompts(trial, session)
