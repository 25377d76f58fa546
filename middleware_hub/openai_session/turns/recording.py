"""Finished turns, hung into their session's tree."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from middleware_hub.openai_session.errors import UnusableAnswer
from middleware_hub.openai_session.faces.answers import Generated
from middleware_hub.openai_session.sessions.messages import Equality, message_bytes
from middleware_hub.openai_session.sessions.store import SessionStore
from middleware_hub.openai_session.sessions.tree import Place, Session, Turn
from middleware_hub.openai_session.turns.asking import Asked
from miles_router.trajectory import InvalidTrajectory, Piece, Trajectory

logger = logging.getLogger(__name__)

MAX_UNTRACED = 1000  # of one session; the log has the rest
TURN_BYTES = 2048  # what a turn takes beside its arrays and messages, about


class Recorder:
    """Turns answers into turns."""

    def __init__(
        self, store: SessionStore, equal: Equality, is_special: Callable[[int], bool], now: Callable[[], float]
    ) -> None:
        self.statistics = store.statistics
        self._store = store
        self._equal = equal
        self._is_special = is_special
        self._now = now

    def record(self, asked: Asked, choices: Sequence[Generated], facts: Mapping[str, Any]) -> None:
        """Hold all choices of an answer, or none.

        Raises:
            UnusableAnswer: it cannot be held exactly.
        """
        prompts = _Prompts(asked)
        parts = [(choice, prompts.given(choice), choice.pieces()) for choice in choices]
        places = _places(asked, choices)
        session = asked.session
        if session.deleted:
            return
        nbytes = prompts.nbytes
        held: dict[int, Place] = {}
        for place in places:
            if id(place) not in held:
                held[id(place)], new = session.hold(place)
                nbytes += new
        for (choice, given, sampled), place in zip(parts, places, strict=True):
            turn = self._turn(asked, held[id(place)], given, sampled, choice, facts)
            if asked.experts is not None:
                turn.experts = asked.experts.take(choice.index, turn.tokens, choice.facts.get("rid"))
            session.grow(turn, self._equal)
            self.statistics.turns += 1
            self.statistics.sampled_tokens += sum(map(len, sampled))
            nbytes += Trajectory(sampled).nbytes + message_bytes(turn.answer) + TURN_BYTES
        self._store.account(session, nbytes)
        self.statistics.given_tokens += prompts.tokens
        self.statistics.reused_tokens += len(asked.held) if asked.held is not None else 0

    def _turn(
        self,
        asked: Asked,
        place: Place,
        given: Piece,
        sampled: tuple[Piece, ...],
        choice: Generated,
        facts: Mapping[str, Any],
    ) -> Turn:
        return Turn(
            path=asked.path,
            parent=place.parent,
            appended=place.appended,
            context=place.context,
            answer=choice.message,
            given=given,
            dropped=asked.dropped,
            sampled=sampled,
            finish_reason=choice.finish_reason,
            ended_itself=self._ended_itself(choice, sampled),
            choice=choice.index,
            segment=asked.segment,
            facts={
                **facts,
                **choice.facts,
                "matched": choice.matched,
                "asked_at": asked.asked_at,
                "answered_at": self._now(),
                "turn_id": asked.turn_id,
                "streamed": asked.stream,
            },
        )

    def _ended_itself(self, choice: Generated, sampled: Sequence[Piece]) -> bool:
        """Whether the last token is the model's own end of turn. With tool calls the engine does not say what
        matched."""
        if not sampled:
            return False
        last = int(sampled[-1].tokens[-1])
        if choice.finish_reason == "tool_calls":
            return self._is_special(last)
        return choice.finish_reason == "stop" and choice.matched == last

    def pass_by(self, asked_path: str, session: Session, reason: str, request_id: str) -> None:
        """A request in a session that is not recorded; the session says so."""
        self.statistics.untraced += 1
        if len(session.untraced) < MAX_UNTRACED:
            session.untraced.append({"path": asked_path, "reason": reason, "request_id": request_id, "at": self._now()})
        fields = {"session_id": session.id, "path": asked_path, "reason": reason, "request_id": request_id}
        logger.warning("turn_not_traced", extra={"fields": fields})


def _places(asked: Asked, choices: Sequence[Generated]) -> list[Place]:
    """Where each choice will hang. A batch of prompts is answered prompt by prompt, each with all of its choices.

    Raises:
        UnusableAnswer: it has not the same number of choices for each prompt.
    """
    if not asked.batch:
        return [asked.place] * len(choices)
    each, rest = divmod(len(choices), len(asked.batch))
    if rest or not all(0 <= choice.index < len(choices) for choice in choices):
        raise UnusableAnswer(f"the worker's answer has {len(choices)} choices for {len(asked.batch)} prompts")
    return [asked.batch[choice.index // each] for choice in choices]


class _Prompts:
    """What the choices of one answer were given: one piece for all that share a prompt."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._pieces: list[tuple[Sequence[int], Piece]] = []

    @property
    def tokens(self) -> int:
        """Tokens given, each prompt counted once."""
        return len(self._given())

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens given."""
        return self._given().nbytes

    def _given(self) -> Trajectory:
        given = self._asked.given
        return Trajectory([given] if given is not None else [piece for _, piece in self._pieces])

    def given(self, choice: Generated) -> Piece:
        """What this choice was given behind its parent's tokens.

        Raises:
            UnusableAnswer: the engine does not tell, or tells other ids than it was sent.
        """
        if self._asked.given is not None:
            self._check(choice)
            return self._asked.given
        if not choice.prompt:
            raise UnusableAnswer("the worker does not tell the ids of the prompt")
        for ids, piece in self._pieces:
            if ids is choice.prompt or ids == choice.prompt:
                return piece
        try:
            piece = Piece.given(choice.prompt)
        except InvalidTrajectory as error:
            raise UnusableAnswer(f"the worker's prompt ids are none: {error}") from None
        self._pieces.append((choice.prompt, piece))
        return piece

    def _check(self, choice: Generated) -> None:
        asked = self._asked
        assert asked.given is not None
        assert asked.held is not None
        if choice.prompt is not None:
            sent = np.concatenate([asked.held, asked.given.tokens])
            if not np.array_equal(np.asarray(choice.prompt), sent):
                raise UnusableAnswer("the worker says that it was given other ids than it was sent")
