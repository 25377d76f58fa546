"""Converts a system prompt and messages of blocks to chat messages.

The result does not depend on how blocks are split. Consecutive user texts become one message, and so does consecutive
assistant content. Each tool result becomes a message of its own, in the order of the calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from middleware_hub.openai_session.agent_apis.messages.echo import Echo
from middleware_hub.openai_session.agent_apis.messages.errors import invalid
from middleware_hub.openai_session.agent_apis.messages.tools import MessagesTools
from middleware_hub.openai_session.sessions.contents import Media, as_parts, text_of
from middleware_hub.openai_session.sessions.messages import Message, OpenCalls, normalized_id, unnamed_id

#: The prefix of a billing block in Claude Code's system prompt. Anthropic's API removes it too.
BILLING = "x-anthropic-billing-header:"
#: The separator between texts of one user message, system message or tool result.
JOINT = "\n"


class MessagesConversation:
    """A builder of the chat messages of one request.

    Args:
        system_first: whether the template accepts a leading system message; otherwise its text becomes user text.
        system_anywhere: whether the template accepts a later system message; otherwise its text becomes user text.
    """

    def __init__(self, echo: Echo, tools: MessagesTools, *, system_first: bool, system_anywhere: bool) -> None:
        self._echo = echo
        self.tools = tools
        self._system_first = system_first
        self._system_anywhere = system_anywhere
        self.media = Media(refuses=True)
        self._messages: list[Mapping[str, Any]] = []
        self._texts: list[str] = []  # consecutive user texts
        self._results: list[dict[str, Any]] = []  # consecutive tool results
        self._order: dict[str, int] = {}  # position of each call of the last answer, by id
        self._open = OpenCalls()  # calls of the last answer that have no result yet
        self._assistant_contents: list[
            tuple[object, str]
        ] = []  # consecutive assistant contents, with their paths in the request
        self._returned: set[int] = set()  # `id()` of the recorded calls that this request has sent back

    def read(self, system: object, messages: object) -> list[Message]:
        """Return all chat messages of a request.

        Raises:
            BadRequest: the messages are invalid, or contain what cannot be traced.
        """
        if not isinstance(messages, list) or not messages:
            raise invalid("messages", "at least one message is required")
        texts = [text for text in _texts(system, "system") if not text.startswith(BILLING)] if system else []
        if texts and self._system_first:
            self._messages.append({"role": "system", "content": JOINT.join(texts)})
        else:
            self._texts += texts
        for place, message in enumerate(messages):
            self._add(message, f"messages.{place}")
        self._flush_user()
        self._flush_assistant()
        if not self._messages:
            raise invalid("messages", "at least one message with content is required")
        return self._messages

    def _add(self, message: object, where: str) -> None:
        if not isinstance(message, Mapping):
            raise invalid(where, "Input should be an object")
        role, content = message.get("role"), message.get("content", ...)
        if role != "assistant":
            self._flush_assistant()
        if role == "user":
            self._read_user(content, f"{where}.content")
        elif role == "assistant":
            self._read_assistant(content, f"{where}.content")
        elif role in ("system", "developer"):
            self._read_system(content, f"{where}.content")
        else:
            raise invalid(f"{where}.role", "Input should be 'user', 'assistant' or 'system'")

    # User content

    def _read_user(self, content: object, where: str) -> None:
        if isinstance(content, str | None):
            self._add_text(content or "")
            return
        for block, at in _blocks(content, where):
            kind = block.get("type")
            if kind == "text":
                self._add_text(_text(block, at))
            elif kind == "tool_result":
                self._read_result(block, at)
            else:
                self._add_text(text_of(block, at, self.media))
        if not content:
            self._add_text("")

    def _add_text(self, text: str) -> None:
        self._flush_results()
        self._texts.append(text)

    def _read_result(self, block: Mapping[str, Any], where: str) -> None:
        call_id = _id(block, "tool_use_id", where) or self._open.only_candidate()
        if call_id is None:
            raise invalid(f"{where}.tool_use_id", "Field required: the call of this result is ambiguous")
        self._open.answer(call_id)
        content = as_parts(block.get("content"))
        if not isinstance(content, str):
            content = self._result_text(content, f"{where}.content", call_id)
        self._flush_texts()
        self._results.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _result_text(self, content: object, where: str, call_id: str) -> str:
        if content is None:
            return ""
        texts, functions = [], []
        for block, at in _blocks(content, where):
            kind = block.get("type")
            if kind == "text":
                texts.append(_text(block, at))
            elif kind == "tool_reference":
                functions.append(self.tools.load_reference(block.get("tool_name"), at, call_id))
            else:
                texts.append(text_of(block, at, self.media))
        return JOINT.join([*texts, *_listed(functions)])

    def _flush_texts(self) -> None:
        if self._texts:
            texts = self._texts if len(self._texts) == 1 else [text for text in self._texts if text]
            self._messages.append({"role": "user", "content": JOINT.join(texts)})
            self._texts = []

    def _flush_results(self) -> None:
        """Append the tool results in the order of their calls. Some templates write results without ids, and would show
        results in another order under the wrong calls."""
        if self._results:
            last = len(self._order)
            self._results.sort(key=lambda result: self._order.get(result["tool_call_id"], last))
            self._messages += self._results
            self._results = []

    def _flush_user(self) -> None:
        self._flush_results()
        self._flush_texts()

    def _read_system(self, content: object, where: str) -> None:
        text = (content or "") if isinstance(content, str | None) else self._system_text(content, where)
        if not text:
            return
        if not self._system_anywhere:
            self._add_text(text)
            return
        self._flush_user()
        self._messages.append({"role": "system", "content": text})

    def _system_text(self, content: object, where: str) -> str:
        """Return the text of a system message in mid-conversation, including tools that it adds or removes."""
        texts, functions = [], []
        for block, at in _blocks(content, where):
            kind, tool = block.get("type"), block.get("tool")
            if kind == "text":
                texts.append(_text(block, at))
            elif kind == "tool_addition":
                functions.append(self.tools.load_added(tool, f"{at}.tool"))
            elif kind == "tool_removal" and isinstance(tool, Mapping) and isinstance(tool.get("name"), str):
                texts.append(f"The tool {tool['name']} is not available any more.")
            else:
                texts.append(text_of(block, at, self.media))
        return JOINT.join([*texts, *_listed(functions)])

    # Assistant content

    def _read_assistant(self, content: object, where: str) -> None:
        self._flush_user()
        self._assistant_contents.append((content, where))

    def _flush_assistant(self) -> None:
        """Append the consecutive assistant contents as one message. A single content that came back before is found
        by its digest."""
        if not self._assistant_contents:
            return
        spoken, self._assistant_contents = self._assistant_contents, []
        digest, message = self._echo.find_returned(spoken[0][0]) if len(spoken) == 1 else (None, None)
        if message is None:
            message = self._assistant_message(spoken)
            message = self._echo.match_recorded(message, digest) if digest is not None else message
        self._order = {str(call["id"]): place for place, call in enumerate(message.get("tool_calls") or ())}
        self._open = OpenCalls(message.get("tool_calls"))
        self._messages.append(message)

    def _assistant_message(self, spoken: Sequence[tuple[object, str]]) -> Mapping[str, Any]:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[Mapping[str, Any]] = []
        for content, where in spoken:
            if isinstance(content, str | None):
                texts.append(content or "")
                continue
            for block, at in _blocks(content, where):
                kind = block.get("type")
                if kind == "text":
                    texts.append(_text(block, at))
                elif kind == "tool_use":
                    calls.append(self._read_call(block, at, len(calls)))
                elif kind == "thinking":
                    thoughts.append(self._read_thinking(block, at))
                elif kind != "redacted_thinking":  # it is encrypted, so no template can read it
                    texts.append(text_of(block, at, self.media))
        message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
        if reasoning := "".join(thoughts):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    def _read_thinking(self, block: Mapping[str, Any], where: str) -> str:
        text = block.get("thinking", ...)
        if not isinstance(text, str | None):
            raise invalid(f"{where}.thinking", "Input should be a valid string")
        return self._echo.restore_thinking(text or "", block.get("signature"))

    def _read_call(self, block: Mapping[str, Any], where: str, number: int) -> Mapping[str, Any]:
        call_id, name = _id(block, "id", where) or unnamed_id(len(self._messages), number), block.get("name")
        if not isinstance(name, str):
            raise invalid(where, "a tool_use block needs a name")
        return self._echo.match_call(call_id, name, block.get("input"), self.tools.schema(name), self._returned)


def _blocks(content: object, where: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    if not isinstance(content, list):
        raise invalid(where, "Input should be a valid string or a list of blocks")
    for place, block in enumerate(content):
        if isinstance(block, str):
            block = {"type": "text", "text": block}
        if not isinstance(block, Mapping):
            raise invalid(f"{where}.{place}", "Input should be an object")
        if block.get("type") is None and isinstance(block.get("text"), str):
            block = {**block, "type": "text"}
        yield block, f"{where}.{place}"


def _id(block: Mapping[str, Any], name: str, where: str) -> str | None:
    try:
        return normalized_id(block.get(name))
    except ValueError as error:
        raise invalid(f"{where}.{name}", f"Input {error}") from None


def _text(block: Mapping[str, Any], where: str) -> str:
    text = block.get("text", ...)
    if not isinstance(text, str | None):
        raise invalid(f"{where}.text", "Input should be a valid string")
    return text or ""


def _listed(functions: list[str]) -> list[str]:
    """Return tool definitions in the frame that Claude Code's prompt announces to the model."""
    return ["<functions>", *functions, "</functions>"] if functions else []


def _texts(content: object, where: str) -> list[str]:
    """Return the texts of content that may hold text blocks only."""
    if isinstance(content, str):
        return [content]
    texts = []
    for block, at in _blocks(content, where):
        if block.get("type") != "text":
            raise _untraceable(block.get("type"), at)
        texts.append(_text(block, at))
    return texts


def _untraceable(kind: object, where: str) -> Exception:
    return invalid(where, f"blocks of the type {str(kind)[:64]!r} cannot be traced here")
