"""Converts instructions, earlier turns and input items to chat messages.

The items of one answer become one message again. Ids of items name the response they belong to. If the agent left the
ids out, the calls tell it (`attribution.py`), else the order: an answer ends at its first output. Instructions and
leading developer messages become one system message, and consecutive user texts one message, since few templates accept
more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from middleware_hub.openai_session.agent_apis.responses.attribution import (
    CALL,
    REASONING,
    RESULT,
    TEXT,
    Answer,
    Attribution,
    same_words,
)
from middleware_hub.openai_session.agent_apis.responses.envelope import JOINT, Responses
from middleware_hub.openai_session.agent_apis.responses.errors import (
    InvalidParameter,
    missing,
    no_compaction,
    wrong_type,
)
from middleware_hub.openai_session.agent_apis.responses.forms import CALLS, FUNCTION, CallForm, held_call
from middleware_hub.openai_session.agent_apis.responses.items import SEALED, response_of, text_of
from middleware_hub.openai_session.agent_apis.responses.tools import shown_name
from middleware_hub.openai_session.sessions import contents
from middleware_hub.openai_session.sessions.contents import HINT, KINDS, Media, text_of_data
from middleware_hub.openai_session.sessions.messages import Message, OpenCalls, normalized_id, unnamed_id

SYSTEM = ("system", "developer")
#: Items that ask OpenAI's server to compact a history, and its encrypted results.
COMPACTIONS = frozenset(("compaction", "compaction_trigger", "compaction_summary", "context_compaction"))
#: Content parts that are text, and the field with the text. A refusal is text of the model too.
TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
THOUGHTS = {"reasoning_text": "text", "summary_text": "text", "text": "text"}
#: Items that contain a tool's output.
OUTPUTS = frozenset(
    (
        *("function_call_output", "custom_tool_call_output", "local_shell_call_output"),
        *("shell_call_output", "apply_patch_call_output"),
    )
)


class ResponsesConversation:
    """A builder of the chat messages of one request.

    Args:
        system_first: whether the template accepts a leading system message; otherwise its text becomes user text.
        system_anywhere: whether the template accepts a later system message; otherwise its text becomes user text.
    """

    def __init__(self, responses: Responses, *, system_first: bool, system_anywhere: bool) -> None:
        self._responses = responses
        self._system_first = system_first
        self._system_anywhere = system_anywhere
        self.media = Media(refuses=True)
        self._messages: list[Message] = []
        self._head: list[str] = []  # texts of the leading system message
        self._user: list[str] = []  # consecutive user texts
        self._attribution = Attribution(responses)
        self._answer: Answer | None = None  # the last answer, if more items may follow
        self._open = OpenCalls()  # calls of that answer that have no output yet
        self._unnamed = 0  # number of calls without an id
        self._answers: list[Answer] = []  # all answers; their messages are filled in at the end
        self._items: dict[str, Mapping[str, Mapping[str, Any]]] = {}  # by response id, then by item id, for references

    def read(self, instructions: str | None, before: Sequence[Message], given: object) -> list[Message]:
        """Return all chat messages of a request.

        Args:
            before: the messages of the previous response.
            given: the request's `input`.

        Raises:
            InvalidParameter: the input is invalid, or contains what cannot be traced.
        """
        if instructions:
            self._head.append(instructions)
        if before:
            first, *rest = before
            if first["role"] == "system":
                self._head.append(first["content"])
            else:
                rest = list(before)
            self._messages += rest
            self._flush_head()
        if isinstance(given, str):
            self._add_text("user", given)
            given = []
        elif not isinstance(given, list):
            raise wrong_type("input", "a string or an array of items")
        for place, item in enumerate(given):
            self._read_item(item, f"input[{place}]")
        for answer in self._answers:
            self._fill_message(answer)
        self._flush_user()
        self._flush_head()
        if not self._messages:
            raise InvalidParameter("input", "'input' must have at least one item.")
        return self._messages

    def _fill_message(self, answer: Answer) -> None:
        """Fill in the message of an answer, from its recorded answer where they match. White space is restored as it
        was sampled, since items do not show all of it."""
        held = self._responses.answer(self._attribution.best_match(answer))
        text, thought = answer.text, "".join(answer.thoughts)
        if held is not None:
            recorded = text_of(held)
            if answer.guessed and not text and same_words(recorded, thought):
                text, thought = recorded, ""  # the item was the answer's text, not its reasoning
            text = recorded if same_words(recorded, text) else text
            if text == recorded and thought == _reasoning_text(held) and answer.calls == (held.get("tool_calls") or []):
                answer.message.update(held)  # with all fields, so that the history finds it by equality
                return
        answer.message["content"] = text
        if thought:
            answer.message["reasoning_content"] = thought
        if answer.calls:
            answer.message["tool_calls"] = answer.calls

    def _read_item(self, item: object, where: str) -> None:
        if not isinstance(item, Mapping):
            raise wrong_type(where, "an object")
        kind = item.get("type") or ("message" if "role" in item else "item_reference")
        if kind == "message":
            self._read_message(item, where)
        elif kind == "reasoning":
            self._read_reasoning(item, where)
        elif not isinstance(kind, str):
            raise wrong_type(f"{where}.type", "a string")
        elif kind in CALLS:
            form, name = CALLS[kind]
            self._read_call(item, form, name, where)
        elif kind in OUTPUTS:
            self._read_result(item, where)
        elif kind == "item_reference":
            self._read_item(self._find_item(item, where), where)
        elif kind in COMPACTIONS:
            raise no_compaction(f"{where}.type", f"Compaction at the server (an item of type '{kind}')")
        elif not self.media.refuses:  # left out and counted: no recorded answer contains such an item
            self.media.replace(kind, where)
        else:
            raise _untraced(where, f"An item of type '{kind[:64]}'")

    def _read_message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if role == "assistant":
            self._read_assistant(item, where)
        elif role == "user" or role in SYSTEM:
            self._add_text("user" if role == "user" else "system", self._text(item, "content", where))
        else:
            values = "'assistant', 'system', 'developer', and 'user'"
            raise InvalidParameter(
                f"{where}.role", f"Invalid value: '{str(role)[:64]}'. Supported values are: {values}."
            )

    # User and system content

    def _add_text(self, role: str, text: str) -> None:
        if role == "system" and not (self._messages or self._user):
            self._head.append(text)
        elif role == "system" and self._system_anywhere:
            self._flush_user()
            self._append({"role": "system", "content": text})
        else:
            self._user.append(text)
        self._end_answer()

    def _flush_head(self) -> None:
        head, self._head = self._head, []
        if not head:
            return
        if not self._system_first and self._messages and self._messages[0]["role"] == "user":
            head = [*head, self._messages.pop(0)["content"]]
        self._messages.insert(0, {"role": "system" if self._system_first else "user", "content": JOINT.join(head)})

    def _flush_user(self) -> None:
        texts, self._user = self._user, []
        if texts:
            self._messages.append({"role": "user", "content": JOINT.join(texts)})

    def _append(self, message: Message) -> None:
        self._flush_user()
        self._messages.append(message)

    # Assistant content

    def _answer_for(self, step: int, found: Sequence[str] = ()) -> Answer:
        """Return the answer that an item belongs to: the last one if the item continues it, else a new one.

        Args:
            step: the kind of the item.
            found: ids of the responses that the item may belong to; empty if unknown.
        """
        answer = self._answer
        if answer is None or not answer.continues(step, found):
            self._end_answer()
            answer = self._answer = Answer({"role": "assistant"})
            self._answers.append(answer)
            self._open = OpenCalls()
            self._append(answer.message)
        answer.narrow(found)
        answer.reached = step
        return answer

    def _end_answer(self) -> None:
        if self._answer is not None:
            self._attribution.settle(self._answer)
        self._answer = None

    def _read_assistant(self, item: Mapping[str, Any], where: str) -> None:
        """Read a message of the assistant. Agents without a place for reasoning send it back as a message, or a part of
        one."""
        content, named = item.get("content"), response_of(item.get("id"))
        if named is not None or not isinstance(content, list):
            content = [text_in(item, "content", where, "")]
        else:
            content = [
                _part(part, f"{where}.content[{place}]", TEXT_PARTS, self.media) for place, part in enumerate(content)
            ]
        if named is None and self._answer is not None and self._answer.reached == RESULT:
            self._end_answer()
        text: list[str] = []
        for part in content:
            thinkers = [] if named is not None or text else self._attribution.find_by_reasoning(part, self._answer)
            if thinkers:
                answer = self._answer_for(REASONING, thinkers)
                answer.guessed = True
                answer.thoughts.append(part)
            else:
                text.append(part)
        if text or not content:
            self._answer_for(TEXT, [named] if named is not None else ()).texts.append("".join(text))

    def _read_reasoning(self, item: Mapping[str, Any], where: str) -> None:
        known, named = item.get("encrypted_content"), response_of(item.get("id"))
        if named is None and isinstance(known, str) and known.startswith(SEALED):
            named = known[len(SEALED) :]
        answer = self._answer_for(REASONING, [named] if self._responses.answer(named) is not None and named else ())
        thinking = text_in(item, "content", where, "", THOUGHTS) if item.get("content") else ""
        if not thinking:  # the agent left the text out; the session has it
            thinking = self._reasoning_of(named)
        answer.thoughts += [thinking] if thinking else []

    def _reasoning_of(self, response_id: str | None) -> str:
        held = self._responses.answer(response_id)
        return _reasoning_text(held) if held is not None else ""

    def _read_call(self, item: Mapping[str, Any], form: CallForm, name: str, where: str) -> None:
        call_id = _id(item, "call_id", where)
        if call_id is None:
            self._unnamed += 1
            call_id = unnamed_id(self._unnamed)
        named = response_of(item.get("id"))
        if named is None and not self._attribution.continues(self._answer, call_id):
            self._end_answer()
        found = self._attribution.find_callers(call_id, item, form, self._answer, named)
        calls = self._answer_for(
            CALL, [response_id for response_id, _ in found] or ([named] if named is not None else ())
        ).calls
        held = next((each for _, each in found if held_call(each, item, form)), None)
        if held is None or form is FUNCTION:
            shown = shown_name(str(item.get("name") or name), item.get("namespace"))
            function = {"name": shown, "arguments": form.arguments(item, where)}
            held = {"id": call_id, "type": "function", "function": function}
        calls.append(held)
        self._open.add(held)

    def _read_result(self, item: Mapping[str, Any], where: str) -> None:
        call_id = _id(item, "call_id", where)
        if call_id is None:  # outputs of `local_shell` name their call in `id`
            call_id = (
                _id(item, "id", where) if item["type"] == "local_shell_call_output" else self._open.only_candidate()
            )
        if call_id is None:
            raise missing(f"{where}.call_id")
        self._open.answer(call_id)
        self._append({"role": "tool", "tool_call_id": call_id, "content": self._output(item, where)})
        if self._answer is not None:
            self._answer.reached = RESULT

    def _output(self, item: Mapping[str, Any], where: str) -> str:
        output = item.get("output")
        if item["type"] == "shell_call_output":
            return orjson.dumps(output).decode()
        if output is None and item["type"] == "apply_patch_call_output":
            return str(item.get("status"))
        return self._text({**item, "output": contents.as_parts(output)}, "output", where)

    def _text(self, item: Mapping[str, Any], name: str, where: str) -> str:
        joint = "" if item.get("role") == "assistant" else "\n"
        return text_in(item, name, where, joint, media=self.media)

    def _find_item(self, item: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        item_id = item.get("id")
        response_id = response_of(item_id, output=False) or ""
        if response_id not in self._items:
            envelope = self._responses.find(response_id)
            items = [] if envelope is None else [*envelope.finished()["output"], *envelope.input()]
            self._items[response_id] = {each["id"]: each for each in items}
        found = self._items[response_id].get(str(item_id))
        if found is not None:
            return found
        raise InvalidParameter(where, f"Item with id '{str(item_id)[:64]}' not found.", None)


def _id(item: Mapping[str, Any], name: str, where: str) -> str | None:
    try:
        return normalized_id(item.get(name))
    except ValueError:
        raise wrong_type(f"{where}.{name}", "a string or an integer") from None


def _reasoning_text(answer: Message) -> str:
    return str(answer.get("reasoning_content") or "")


def text_in(
    item: Mapping[str, Any],
    name: str,
    where: str,
    joint: str,
    parts: Mapping[str, str] = TEXT_PARTS,
    media: Media | None = None,
) -> str:
    """Return the text of a field that is a string or a list of parts.

    Args:
        joint: the separator between parts.
        parts: the types of parts that are text, and the field with the text.
        media: how other parts are handled; without it they are refused.

    Raises:
        InvalidParameter: the field is neither, or has parts that are not text.
    """
    content, where = item.get(name), f"{where}.{name}"
    if isinstance(content, str):
        return content
    if content is None and name in item:
        return ""
    if content is None:
        raise missing(where)
    if not isinstance(content, list):
        raise wrong_type(where, "a string or an array")
    return joint.join(_part(part, f"{where}[{place}]", parts, media) for place, part in enumerate(content))


def _part(part: object, where: str, parts: Mapping[str, str], media: Media | None) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise wrong_type(where, "an object")
    if part.get("type") is None and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = str(part.get("type"))
    if media is not None and kind in (contents.DOCUMENT, contents.SEARCH_RESULT, contents.RESOURCE):
        return contents.text_of(part, where, media)
    if kind not in parts:
        return _replace_medium(part, kind, where, media)
    text = part.get(parts[kind], ...)
    if text is None:
        return ""
    if not isinstance(text, str):
        raise missing(f"{where}.{parts[kind]}")
    return text


def _replace_medium(part: Mapping[str, Any], kind: str, where: str, media: Media | None) -> str:
    """Return the text of a text file, or the placeholder for any other part that is not text."""
    text = text_of_data(part.get("file_data")) if kind in KINDS else None
    if text is not None:
        return text
    if media is None or media.refuses:
        raise _untraced(where, f"Content of type '{kind[:64]}'")
    return media.replace(kind, where)


def _untraced(where: str, what: str) -> InvalidParameter:
    return InvalidParameter(
        f"{where}.type", f"{what} is not available in a traced session; {HINT}.", "unsupported_value"
    )
