"""`/v1/completions` within a session: text or ids in, text out; the engine tells the ids of both in its own fields.

A prompt of ids that begins with all tokens of a held turn extends that turn; any other prompt is a root.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import orjson

from middleware_hub.openai_session.errors import UnusableAnswer
from middleware_hub.openai_session.faces.answers import MALFORMED, Generated, Spans, spans_of
from middleware_hub.openai_session.faces.streams import Stream, Versions
from middleware_hub.openai_session.sessions.messages import Message
from middleware_hub.openai_session.sessions.tree import Place, Session, Turn
from middleware_hub.openai_session.turns.asking import Asked
from miles_router.errors import BadRequest
from miles_router.trajectory import InvalidTrajectory, Piece
from miles_router.trajectory.pieces import Tokens

COMPLETIONS = "/v1/completions"
CONTEXT = b"completions"


def ask(session: Session, parsed: object, *, now: float) -> Asked:
    """Place a completion request in its session.

    Raises:
        BadRequest: it is none.
    """
    if not isinstance(parsed, Mapping):
        raise BadRequest("the request body must be a JSON object")
    prompt = parsed.get("prompt")
    if not isinstance(prompt, (str, list)):
        raise BadRequest("prompt must be a string, token ids, or a list of either")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str) or _are_ids(prompt):
        asked = Asked(session, COMPLETIONS, parsed, _root(prompt), now)
        _extend(asked, prompt)
    else:
        batch = [_root(each) for each in prompt]
        asked = Asked(session, COMPLETIONS, parsed, batch[0], now, batch=batch, segment="batch")
    return asked


def untraceable(parsed: object) -> str | None:
    """Why a completion cannot be recorded, if it cannot."""
    if isinstance(parsed, Mapping) and parsed.get("echo"):
        return "with echo, text and logprobs are the prompt's as well"
    return None


def _are_ids(prompt: object) -> bool:
    return isinstance(prompt, list) and all(type(each) is int for each in prompt)


def _root(prompt: object) -> Place:
    return Place(None, (_message(prompt),), CONTEXT)


def _message(prompt: object) -> Message:
    """A prompt as a message. Ids are held as tokens, once: here they only say which they are."""
    if isinstance(prompt, list):
        digest = blake2b(orjson.dumps(prompt), digest_size=16).hexdigest()
        return {"role": "prompt", "content": f"{len(prompt)} token ids, blake2b {digest}"}
    return {"role": "prompt", "content": prompt}


def _extend(asked: Asked, prompt: str | list[Any]) -> None:
    if isinstance(prompt, str):
        asked.segment = "text_prompt" if _continues(prompt, asked.session) else None
        return
    try:
        ids = Piece.given(prompt).tokens
    except InvalidTrajectory:
        return  # the engine says what is wrong with it
    turn = _deepest(ids, asked.session)
    if turn is not None:
        asked.place = Place(turn, (_message(prompt[turn.tokens :]),), turn.context)
        asked.held, asked.given = ids[: turn.tokens], Piece.given(ids[turn.tokens :])


def _continues(prompt: str, session: Session) -> bool:
    """Whether a text goes on from a held one. Its ids need not begin with those held, so that it is a root."""
    return any(
        prompt.startswith(turn.appended[0]["content"] + turn.answer["content"])
        for turn in session.roots
        if turn.context == CONTEXT
    )


def _deepest(ids: Tokens, session: Session) -> Turn | None:
    """The turn with the most tokens of those that the ids begin with, the latest of several."""
    best: Turn | None = None
    candidates = [root for root in session.roots if root.context == CONTEXT]
    while candidates:
        turn = candidates.pop()
        if _goes_on(ids, turn):
            candidates.extend(turn.children)
            if best is None or (turn.tokens, turn.number) > (best.tokens, best.number):
                best = turn
    return best


def _goes_on(ids: Tokens, turn: Turn) -> bool:
    """Whether a turn's own tokens stand in ids that begin with its parent's."""
    begin = turn.prompt_tokens - len(turn.given)
    for piece in (turn.given, *turn.sampled):
        if not np.array_equal(ids[begin : begin + len(piece)], piece.tokens):
            return False
        begin += len(piece)
    return True


def body(asked: Asked) -> bytes:
    """The request for the engine."""
    fields = {**asked.parsed, "return_token_ids": True}
    if fields.get("logprobs") is None:
        fields["logprobs"] = 0
    return orjson.dumps(fields)


def wants_logprobs(asked: Asked) -> bool:
    """Whether the client asked for logprobs; 0 asks too."""
    return asked.parsed.get("logprobs") is not None


def generated(answer: Mapping[str, Any]) -> list[Generated]:
    """What was sampled, choice by choice.

    Raises:
        UnusableAnswer: the answer has not what recording needs.
    """
    versions, one = answer.get("metadata") or {}, len(answer["choices"]) == 1
    try:
        choices = [_Choice(answer.get("id") if one else None) for _ in answer["choices"]]
        for choice, each in zip(choices, answer["choices"], strict=True):
            choice.take(each, None)
        told = versions if one else _uniform(versions)
        # Several are told the spans of the first alone.
        source = "engine" if one else "engine_first_choice"
        return [
            choice.generated(index, spans_of(told, len(choice.ids)), source) for index, choice in enumerate(choices)
        ]
    except MALFORMED as error:
        raise UnusableAnswer(f"the worker's answer lacks what recording needs: {error!r}") from None


def _uniform(versions: Mapping[str, Any]) -> Mapping[str, Any]:
    """An answer of several choices tells the spans of its first alone; they hold for all if they are one."""
    told = {span["version"] for span in versions.get("weight_versions") or ()} or {versions.get("weight_version")}
    if len(told) > 1:
        raise UnusableAnswer("the weights changed under an answer of several choices, which tells the first's alone")
    return {"weight_version": told.pop()}


def shown(answer: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
    """The answer, or a chunk of it, with what the client asked for itself."""
    kept = {**answer, "choices": [_shown_choice(choice, asked) for choice in answer["choices"]]}
    if kept.get("sglext") == {}:  # its routed experts were taken out
        del kept["sglext"]
    return kept


def _shown_choice(choice: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
    kept = dict(choice)
    if not wants_logprobs(asked):
        kept["logprobs"] = None
    if not asked.wants("return_token_ids"):
        kept.pop("token_ids", None)
        kept.pop("prompt_token_ids", None)
    return kept


class _Choice:
    """One choice, whole or as it grows."""

    def __init__(self, rid: str | None) -> None:
        self.rid = rid
        self.text: list[str] = []
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.prompt: list[int] | None = None
        self.finish_reason: str | None = None
        self.matched: int | str | None = None
        self.versions = Versions()

    def take(self, choice: Mapping[str, Any], version: str | None) -> bool:
        ids = choice.get("token_ids") or ()
        self.text.append(choice.get("text") or "")
        self.ids += ids
        self.logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or ()
        self.prompt = self.prompt or choice.get("prompt_token_ids")
        self.versions.reach(len(self.ids), version)
        if choice.get("finish_reason") is not None:
            self.finish_reason, self.matched = choice["finish_reason"], choice.get("matched_stop")
        return bool(ids)

    def generated(self, index: int, versions: Spans, source: str, first_token_at: float | None = None) -> Generated:
        if self.finish_reason is None:
            raise UnusableAnswer("the worker's answer has no finish reason")
        return Generated(
            index=index,
            message={"role": "assistant", "content": "".join(self.text)},
            finish_reason=self.finish_reason,
            matched=self.matched,
            ids=self.ids,
            logprobs=self.logprobs,
            versions=versions,
            prompt=self.prompt,
            facts={"rid": self.rid, "first_token_at": first_token_at, "versions": source},
        )


class StreamedCompletion(Stream):
    """A completion: ids come with each chunk."""

    def __init__(self, asked: Asked, version: Callable[[], str | None]) -> None:
        super().__init__(asked, version)
        self._choices: dict[int, _Choice] = {}

    def _take(self, chunk: Mapping[str, Any], version: str | None) -> bool:
        tokens = False
        for choice in chunk["choices"]:
            known = self._choices.setdefault(choice["index"], _Choice(chunk.get("id")))
            tokens = known.take(choice, version) or tokens
        return tokens

    def _shown(self, chunk: dict[str, Any]) -> Mapping[str, Any] | None:
        kept = shown(chunk, self._asked)
        emptied = "sglext" in chunk and not (kept["choices"] or kept.get("usage") or "sglext" in kept)
        return None if emptied else kept

    def _generated(self) -> list[Generated]:
        return [
            choice.generated(index, choice.versions.spans, "router", self.first_token_at)
            for index, choice in sorted(self._choices.items())
        ]
