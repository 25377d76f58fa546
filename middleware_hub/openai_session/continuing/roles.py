"""Find out which messages a chat template writes, by their roles. Many templates write nothing for an unknown role:
Qwen3's drops `developer`, gpt-oss' drops a system message behind the first message."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from middleware_hub.openai_session.continuing.probes import CALLING, CONTENT, TOOLS, Shape, probe_of
from middleware_hub.openai_session.continuing.templates import CannotRender, Renderer
from middleware_hub.openai_session.sessions.messages import Message

DEVELOPER = "developer"
#: The separator between an instruction and a user's text that are joined in one message.
JOINT = "\n\n"
#: Roles that SGLang accepts in upper or lower case (0.5.23, `ChatCompletionMessageGenericParam`).
ANY_CASE = frozenset(("system", "assistant", "tool", "function", DEVELOPER, "latest_reminder", "root"))
MAX_KEPT = 4096  # the longest roles and settings, in characters, whose results are cached


class Roles:
    """The roles that a model's template writes, found by rendering probe messages."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._cached_dropped = functools.lru_cache(maxsize=1024)(self._find_dropped)

    def with_known_roles(self, messages: Sequence[Message]) -> tuple[Sequence[Message], Sequence[int]]:
        """Return chat messages with roles that the template knows, and for each its index in `messages`.

        A `developer` message becomes a `system` message where the template writes one; otherwise its text joins the
        user's. The result for a message depends only on the messages before it and on the next one, so later turns read
        it the same way.
        """
        if all(message["role"] in ("user", "assistant", "tool", "system") for message in messages):
            return messages, range(len(messages))
        found: list[Message] = []
        places: list[int] = []
        instructions: list[Any] = []  # contents of developer messages, for the user's message behind them
        for place, message in enumerate(messages):
            role = message["role"].lower() if message["role"].lower() in ANY_CASE else message["role"]
            behind = messages[place + 1]["role"].lower() if place + 1 < len(messages) else None
            if role == DEVELOPER and not self.takes_system(found, alone=behind in (None, "assistant")):
                instructions.append(message.get("content"))
                if behind in (DEVELOPER, "user"):
                    continue
                role, message = "user", {"role": "user", "content": None}
                if found and found[-1]["role"] == "user":
                    message = found.pop()
                    places.pop()
                    instructions.insert(0, message.get("content"))
            elif instructions:
                instructions.append(message.get("content"))
            if instructions:
                message, instructions = {**message, "content": _joined(instructions)}, []
            role = "system" if role == DEVELOPER else role
            found.append(message if role == message["role"] else {**message, "role": role})
            places.append(place)
        return found, places

    def first_dropped(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, template_kwargs: Mapping[str, Any]
    ) -> int | None:
        """Return the index of the first message that the template does not write. None if it writes all messages, or
        refuses them with an error."""
        labels = tuple(map(_label, messages))
        if labels[-1:] == ("assistant",):
            labels = (*labels[:-1], "user")  # as SGLang renders it (`Renderer.as_engine_reads`)
        settings = orjson.dumps(template_kwargs, option=orjson.OPT_SORT_KEYS)
        small = sum(map(len, labels)) + len(settings) <= MAX_KEPT
        return (self._cached_dropped if small else self._find_dropped)(labels, bool(tools), settings)

    @functools.cached_property
    def system_first(self) -> bool:
        """Whether the template writes a system message in front of a user's."""
        return self.takes_system()

    def takes_system(self, before: Sequence[Message] = (), *, alone: bool = False) -> bool:
        """Return whether the template writes a system message behind `before`. With `alone`, no user's message follows
        it."""
        labels = (*map(_label, before), "system", *(() if alone else ("user",)))
        try:
            return self._first_missing(labels, tools=False, settings=b"{}") is None
        except CannotRender:
            return False

    def _find_dropped(self, labels: tuple[str, ...], tools: bool, settings: bytes) -> int | None:
        try:
            return self._first_missing(labels, tools=tools, settings=settings)
        except CannotRender:
            return None

    def _first_missing(self, labels: tuple[str, ...], *, tools: bool, settings: bytes) -> int | None:
        """Return the index of the first role whose message the template does not write, or None.

        Raises:
            CannotRender: the template refuses these roles.
        """
        _, probes = probe_of(Shape(labels))
        if not probes:
            return None
        text = self._renderer.render(
            probes, TOOLS if tools else None, generation_prompt=True, template_kwargs=orjson.loads(settings)
        )
        written = {*CONTENT.findall(text)}
        places = (place for place, label in enumerate(labels) if label != CALLING)
        return next((place for place in places if probes[place]["content"] not in written), None)


def _label(message: Message) -> str:
    return CALLING if message.get("tool_calls") else str(message["role"])


def _joined(contents: Sequence[Any]) -> Any:
    """Join contents: to a text, or to a list of parts if one of them is a list."""
    given = [content for content in contents if content]
    if all(isinstance(content, str) for content in given):
        return JOINT.join(given)
    return [
        part
        for content in given
        for part in (content if isinstance(content, list) else [{"type": "text", "text": content}])
    ]
