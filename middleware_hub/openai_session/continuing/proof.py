"""Prove that the text a template writes behind an answer does not depend on the history.

For one shape (calls and reasoning of the answer, roles of the appended messages, tools or none) and one set of template
settings:

- the short conversation of endings.py can be rendered;
- every appended message is in its tail, in order;
- the tail is the same text in longer conversations, with tool calls, reasoning and several questions before it;
- nothing of the history moves into the tail, and nothing but answers disappears from the history.

Common shapes are proved at the start, or were at an earlier start (proof_file.py). Other shapes are proved when they
first occur. Ids are compared as well: a note reports where joined ids differ from the ids of the whole text.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from middleware_hub.openai_session.continuing.endings import MARKER, Endings, NotAppendOnly, strip_call_end
from middleware_hub.openai_session.continuing.probes import (
    BESIDE,
    STANDARD,
    TOOLS,
    History,
    Shape,
    histories,
    history_texts,
    probe_of,
)
from middleware_hub.openai_session.continuing.proof_file import Refusals
from middleware_hub.openai_session.continuing.templates import CannotRender, Renderer
from middleware_hub.openai_session.sessions.messages import Message
from middleware_hub.openai_session.sessions.turn import Context
from middleware_hub.tokenizing.encoding import InexactTokenizer
from miles_router.errors import ConfigError

#: Proofs in the cache, by shape and settings.
MAX_PROOFS = 512
#: The longest settings and roles, in characters, whose proof is cached.
MAX_KEPT = 1 << 16
#: The most roles of a shape: a proof takes half a millisecond for each, and blocks the event loop.
MAX_ROLES = 128
PROVED_AT_START = [shape._replace(reasoning=reasoning) for shape in STANDARD.values() for reasoning in (False, True)]


class Proof:
    """The results of proving one renderer. `known` contains the refusals of `PROVED_AT_START` if they were proved at an
    earlier start."""

    def __init__(self, renderer: Renderer, endings: Endings, known: Refusals | None) -> None:
        self.endings = endings
        self._renderer = renderer
        self._cached_refusal = functools.lru_cache(maxsize=MAX_PROOFS)(self._find_refusal)
        found = known if known is not None else [self._find_refusal(shape, b"{}") for shape in PROVED_AT_START]
        #: Results for the shapes that are proved at the start.
        self.refusals = dict(zip(PROVED_AT_START, found, strict=True))
        self.exact: list[str] = []
        self.refused: dict[str, str] = {}
        self.notes: list[str] = []
        for name, shape in STANDARD.items():
            self._report(name, shape)

    def _report(self, name: str, shape: Shape) -> None:
        refusal = self.refusals[shape] or self.refusals[shape._replace(reasoning=True)]
        if refusal is not None:
            self.refused[name] = refusal
            return
        self.exact.append(name)
        note = self._compare_ids(shape)
        if note is not None:
            self.notes.append(f"{name}: {note}")

    def refusal(self, shape: Shape, template_kwargs: Mapping[str, Any]) -> str | None:
        """Return why a shape cannot be continued exactly under these settings; None if it can."""
        if not template_kwargs and shape in self.refusals:
            return self.refusals[shape]
        settings = orjson.dumps(template_kwargs, option=orjson.OPT_SORT_KEYS)
        large = len(settings) + sum(map(len, shape.roles)) > MAX_KEPT
        return self._find_refusal(shape, settings) if large else self._cached_refusal(shape, settings)

    def require(self, shape: Shape, template_kwargs: Mapping[str, Any]) -> None:
        """Prove a shape under the settings of a request, unless the result is known.

        Raises:
            NotAppendOnly: the shape cannot be continued exactly, or has too many roles.
        """
        if len(shape.roles) > MAX_ROLES:
            raise NotAppendOnly(f"more than {MAX_ROLES} roles are appended")
        refusal = self.refusal(shape, template_kwargs)
        if refusal is not None:
            raise NotAppendOnly(refusal)

    def describe(self) -> dict[str, object]:
        """Return the results for the log and `GET /router/info`."""
        return {"template": self._renderer.origin, "exact": self.exact, "refused": self.refused, "notes": self.notes}

    def _find_refusal(self, shape: Shape, settings: bytes) -> str | None:
        context = Context(TOOLS if shape.tools else None, orjson.loads(settings))
        try:
            self._prove(shape, context)
        except (CannotRender, NotAppendOnly) as reason:
            return str(reason)
        return None

    def _prove(self, shape: Shape, context: Context) -> None:
        answer, appended = probe_of(shape)
        short = self.endings.tail(answer, appended, context)
        ending = self.endings.measure(answer, context)
        strip_call_end(short, ending)
        if not appended and ending.with_prompt == ending.without_prompt:
            raise NotAppendOnly("the template writes no prompt for another answer behind an answer")
        _require_all(short, appended)
        longer = [long for long in histories() if self._has_same_tail(long, shape, short, context)]
        if not longer:
            raise NotAppendOnly("the template refuses every longer conversation")

    def _has_same_tail(self, history: History, shape: Shape, short: str, context: Context) -> bool:
        """Return False if the template refuses this history; otherwise require that the tail is `short`."""
        answer, appended = probe_of(shape)
        before = history.messages
        try:
            alone, _ = self.endings.split_at_answer(answer, (), context, before=before)
        except CannotRender:
            return False
        head, tail = self.endings.split_at_answer(answer, appended, context, before=before)
        _, with_text = self.endings.split_at_answer(answer, appended, context, before=before, content=BESIDE)
        # Gemma 4 writes the text of an answer with calls behind the results. The recorded ids have it where it was
        # sampled.
        if tail != short or (with_text != short and BESIDE not in with_text):
            raise NotAppendOnly(f"what the template writes behind an answer depends on {history.name}")
        for what, written in history_texts(before):
            if written in tail:
                raise NotAppendOnly(f"the template writes {what} behind the answer")
            if head.count(written) != alone.count(written):
                raise NotAppendOnly(f"the template writes {what} differently once messages are appended")
        return True

    def _compare_ids(self, shape: Shape) -> str | None:
        """Return None if ids joined at a stop token equal the ids of the whole text; otherwise a note with the
        difference."""
        answer, appended = probe_of(shape)
        context = Context(TOOLS if shape.tools else None, {})
        head, tail = self.endings.split_at_answer(answer, appended, context)
        begin = len(self.endings.measure(answer, context).rest or "")
        stop = next(filter(self._renderer.is_special, self._renderer.encode(tail[begin:])), None)
        if stop is None:
            return "no special token ends an answer: the text behind an answer is encoded separately"
        spelled = self._renderer.spelling(stop)
        whole, cut = head + MARKER + tail, len(head + MARKER) + tail.index(spelled, begin) + len(spelled)
        try:
            joined = self._renderer.encode(whole[:cut]) + self._renderer.encode_behind(whole[cut:], stop)
        except InexactTokenizer as error:
            return str(error)
        return None if joined == self._renderer.encode(whole) else "the joined ids differ from the whole text's"


def _require_all(text: str, appended: Sequence[Message]) -> None:
    place = 0
    for message in appended:
        place = text.find(str(message["content"]), place)
        if place < 0:
            raise NotAppendOnly(f"the template omits a message of role {str(message['role'])[:64]} here")


def prove(renderer: Renderer, known: Refusals | None = None) -> Proof:
    """Prove the standard shapes of a renderer. `known` contains refusals of an earlier start.

    Raises:
        ConfigError: the template cannot append a user's message, or a tool's where it accepts tools.
    """
    try:
        proof = Proof(renderer, Endings(renderer, Context(None, {})), known)
    except CannotRender as reason:
        raise ConfigError(f"openai_session_middleware: {renderer.origin} cannot be continued: {reason}") from None
    needed = ["user", "tool"] if _takes_tools(proof.endings) else ["user"]
    for name in needed:
        if name in proof.refused:
            raise ConfigError(
                f"openai_session_middleware: {renderer.origin} cannot be continued exactly by a {name}'s message: "
                f"{proof.refused[name]}"
            )
    return proof


def _takes_tools(endings: Endings) -> bool:
    answer, appended = probe_of(STANDARD["tool"])
    try:
        text = endings.tail(answer, appended, Context(TOOLS, {}))
    except CannotRender:
        return False
    return str(appended[0]["content"]) in text
