"""Finished turns, hung into their session's tree."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from middleware_hub.openai_session.episodes.contract import SessionStatus
from middleware_hub.openai_session.errors import SessionNotFound, UnusableAnswer
from middleware_hub.openai_session.sessions.agent_request import AgentRequest
from middleware_hub.openai_session.sessions.history import ParentMatch
from middleware_hub.openai_session.sessions.messages import message_bytes
from middleware_hub.openai_session.sessions.prompting import tools_of
from middleware_hub.openai_session.sessions.session import Session, reason_name
from middleware_hub.openai_session.sessions.store import SessionStore
from middleware_hub.openai_session.sessions.turn import Turn
from middleware_hub.openai_session.turns.plan import TurnPlan
from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.client_json import nests_too_deep
from miles_router.engines.openai.choices import Choice
from miles_router.middlewares.episodes import RunSeries
from miles_router.trajectory import InvalidTrajectory, Piece

logger = logging.getLogger(__name__)

MAX_UNTRACED = 1000  # of one session; the log has the rest
UNTRACED_BYTES = 1024  # of each of them, about
LENGTH = "length"  # how an answer ends that may not be longer
MAX_MODEL = 256  # characters of a model's name that are kept
TURN_BYTES = 2304  # what a turn takes beside its arrays and messages, about


class TurnRecorder:
    """Turns answers into turns."""

    def __init__(
        self,
        store: SessionStore,
        is_special: Callable[[int], bool],
        now: Callable[[], float],
        run: RunSeries | None = None,
    ) -> None:
        self.statistics = store.statistics
        self.written_ids = store.written_ids
        self._store = store
        self._is_special = is_special
        self._now = now
        self._run = run or RunSeries(lambda: None)

    def record(
        self, plan: TurnPlan, choices: Sequence[Choice], facts: Mapping[str, Any], cache: int | None = None
    ) -> bool:
        """Record all choices of an answer, or none. Return False where the session was deleted meanwhile.

        Args:
            cache: the prefix cache that the turn was sampled with, where that is known.

        Raises:
            UnusableAnswer: it cannot be held exactly.
            SessionNotFound: the session was deleted, together with what ran in it.
        """
        if any(nests_too_deep([each.message, each.facts, each.matched]) for each in choices):
            raise UnusableAnswer("the worker's answer cannot be recorded: it is nested too deep")
        request = plan.request
        prompts = _Prompts(request)
        parts = [(choice, prompts.given(choice), _pieces(choice)) for choice in choices]
        places = _places(request, choices)
        session = request.session
        if session.ending.status is SessionStatus.DISCARDED:
            raise SessionNotFound(f"session {session.id!r} was deleted")
        if session.ending.status.is_forgotten:
            return False
        fields = plan.grant.fields
        if isinstance(model := fields.get("model"), str):
            session.model = model[:MAX_MODEL]
        nbytes = prompts.nbytes
        held: dict[int, ParentMatch] = {}
        for place in places:
            if id(place) not in held:
                held[id(place)], new = session.history.intern(place)
                nbytes += new
        tools, new = session.history.intern_tools(tools_of(fields) if request.places[0].parent is None else None)
        nbytes += new
        requests: dict[int, int] = {}  # the number of the first turn that each prompt has, by its piece
        for (choice, given, sampled), place in zip(parts, places, strict=True):
            number = len(session.turns)
            numbers = {"number": number, "request": requests.setdefault(id(given), number)}
            turn = self._turn(plan, held[id(place)], given, sampled, choice, facts, tools=tools, cache=cache, **numbers)
            session.history.append(turn)
            self.statistics.turns += 1
            self.statistics.unrecorded_history += session.history.classify(turn).unrecorded
            self.statistics.sampled_tokens += sum(map(len, sampled))
            nbytes += sum(piece.nbytes for piece in sampled) + message_bytes(turn.answer) + TURN_BYTES
            if request.remember is not None:
                nbytes += request.remember(turn)
            if plan.written:
                self.written_ids.recorded(session.id, turn, plan.written)
        tokens = sum(len(piece) for _, _, sampled in parts for piece in sampled)
        session.settle(plan.grant.reservation, tokens, plan.repeat_key)
        if plan.grant.cut_by is not None and any(choice.finish == LENGTH for choice in choices):
            self._store.end(session, plan.grant.cut_by)
        self._store.account(session, nbytes)
        new, reused = prompts.tokens, request.prompt.held if request.prompt is not None else 0
        self.statistics.given_tokens += new
        self.statistics.reused_tokens += reused
        for turn in session.turns[len(session.turns) - len(choices) :]:
            cached = turn.facts.get("cached_tokens") if new or reused else None
            reason = reason_name(session.history.classify(turn).reason)
            self._run.record(_by_version(turn.sampled), given=new, reused=reused, cached=cached, reason=reason)
            new = reused = 0  # once for all choices
        return True

    def check_prompts(self, request: AgentRequest, choices: Sequence[Choice]) -> None:
        """Compare the ids that the engine tells of its prompts with those that it was sent.

        Raises:
            UnusableAnswer: it tells none, or others.
        """
        prompts = _Prompts(request)
        for choice in choices:
            prompts.given(choice)

    def _turn(
        self,
        plan: TurnPlan,
        place: ParentMatch,
        given: Piece,
        sampled: tuple[Piece, ...],
        choice: Choice,
        facts: Mapping[str, Any],
        *,
        tools: bytes,
        cache: int | None,
        number: int,
        request: int,
    ) -> Turn:
        asked, prompt = plan.request, plan.request.prompt
        tokens = (0 if prompt is None else prompt.held) + len(given) + sum(map(len, sampled))
        return Turn(
            path=asked.path,
            parent=place.parent,
            appended=place.appended,
            context=place.context,
            answer=choice.message,
            given=given,
            dropped=0 if prompt is None else prompt.dropped,
            sampled=sampled,
            finish_reason=choice.finish,
            ended_itself=self._ended_itself(choice, sampled),
            choice=choice.index,
            segment=asked.segment,
            side_call=plan.side_call,
            cache=cache,
            number=number,
            request=request,
            tools=tools,
            rows=plan.deliveries.take(choice.index, tokens, choice.facts.get("rid")),
            facts={
                **facts,
                **choice.facts,
                **({"cache_versions": []} if choice.facts.get("cached_tokens") == 0 else {}),
                **asked.facts,
                "matched": choice.matched,
                "asked_at": asked.asked_at,
                "answered_at": self._now(),
                "turn_id": plan.turn_id,
                "streamed": asked.stream,
                **({"asked_for": plan.grant.asked_for} if plan.grant.asked_for else {}),
            },
        )

    def said_ids(self, choice: Choice) -> Sequence[int]:
        """Return what a choice sampled, without the special token that ended it.

        Raises:
            UnusableAnswer: its parts do not fit each other.
        """
        if not _pieces(choice):
            return choice.ids
        return choice.ids[:-1] if self._is_special(choice.ids[-1]) else choice.ids

    def _ended_itself(self, choice: Choice, sampled: Sequence[Piece]) -> bool:
        """Whether the last token is the model's own end of turn. With tool calls the engine does not say what
        matched."""
        if not sampled:
            return False
        last = int(sampled[-1].tokens[-1])
        if choice.finish == "tool_calls":
            return self._is_special(last)
        return choice.finish == "stop" and choice.matched == last

    def pass_by(self, path: str, session: Session, reason: str, request_id: str) -> None:
        """A request in a session that is not recorded; the session says so."""
        self.statistics.untraced += 1
        if len(session.untraced) < MAX_UNTRACED:
            self._store.account(session, UNTRACED_BYTES)
            session.untraced.append({"path": path, "reason": reason, "request_id": request_id, "at": self._now()})
        fields = {"session_id": session.id, "path": path, "reason": reason, "request_id": request_id}
        logger.warning("turn_not_traced", extra={"fields": fields})


def _by_version(pieces: Iterable[Piece]) -> Counter[str | None]:
    """How many tokens each weight version sampled."""
    tokens: Counter[str | None] = Counter()
    for piece in pieces:
        tokens[piece.version] += len(piece)
    return tokens


def _pieces(choice: Choice) -> tuple[Piece, ...]:
    """The sampled tokens.

    Raises:
        UnusableAnswer: the parts do not fit each other.
    """
    try:
        return choice.pieces()
    except (InvalidTrajectory, UnreadableAnswer) as error:
        raise UnusableAnswer(f"the worker's answer cannot be recorded: {error}") from None


def _places(request: AgentRequest, choices: Sequence[Choice]) -> list[ParentMatch]:
    """Where each choice will hang. A batch of prompts is answered prompt by prompt, each with all of its choices.

    Raises:
        UnusableAnswer: it has not the same number of choices for each prompt.
    """
    places = request.places
    if len(places) == 1:
        return [places[0]] * len(choices)
    each, rest = divmod(len(choices), len(places))
    if rest or not all(0 <= choice.index < len(choices) for choice in choices):
        raise UnusableAnswer(f"the worker's answer has {len(choices)} choices for {len(places)} prompts")
    return [places[choice.index // each] for choice in choices]


class _Prompts:
    """What the choices of one answer were given: one piece for all that share a prompt."""

    def __init__(self, request: AgentRequest) -> None:
        self._prompt = request.prompt
        self._pieces: list[tuple[Sequence[int], Piece]] = []

    @property
    def tokens(self) -> int:
        """Tokens given, each prompt counted once."""
        return sum(map(len, self._given()))

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens given."""
        return sum(piece.nbytes for piece in self._given())

    def _given(self) -> list[Piece]:
        return [self._prompt.given] if self._prompt is not None else [piece for _, piece in self._pieces]

    def given(self, choice: Choice) -> Piece:
        """What this choice was given behind its parent's tokens.

        Raises:
            UnusableAnswer: the engine does not tell, or tells other ids than it was sent.
        """
        if self._prompt is not None:
            if choice.prompt is not None and not np.array_equal(np.asarray(choice.prompt), self._prompt.ids()):
                raise UnusableAnswer("the worker says that it was given other ids than it was sent")
            return self._prompt.given
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
