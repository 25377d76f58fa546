"""The recorder of finished turns, which adds them to their session's tree, with an account of how the sampled text
became the message that the agent was shown.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from middleware_hub.openai_session.episodes.contract import SessionStatus
from middleware_hub.openai_session.errors import UnusableAnswer
from middleware_hub.openai_session.sessions.history import ParentMatch
from middleware_hub.openai_session.sessions.messages import message_bytes
from middleware_hub.openai_session.sessions.session import AgentRequest, Session, reason_name
from middleware_hub.openai_session.sessions.store import SessionStore
from middleware_hub.openai_session.sessions.turn import Turn, tools_of
from middleware_hub.openai_session.statistics import SessionStatistics
from middleware_hub.openai_session.turns.plan import TurnPlan
from middleware_hub.openai_session.turns.stream import SHOWN_OTHERWISE
from miles_router.engines import paths
from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.json_bytes import nests_too_deep
from miles_router.engines.openai import chat
from miles_router.engines.openai.chat import tools_by_name
from miles_router.engines.openai.choices import Choice
from miles_router.engines.openai.held_deltas import OWN_ENDS
from miles_router.engines.openai.unshown import NOT_IN_TEXT
from miles_router.engines.parsers.accounting import INVALID_JSON, WHOLE, account
from miles_router.errors import NotFound
from miles_router.middlewares.episodes import RunSeries
from miles_router.trajectory import InvalidTrajectory, Piece

#: The most characters that are accounted for, since that runs on the event loop: up to 0.1 s if a parser dropped all.
MAX_TEXT = 1 << 16
#: The fact of a turn with `WHOLE`, or with the list of reasons why the message is not all of the sampled text.
PARSED = "parsed"


def parsed_facts(
    plan: TurnPlan, choice: Choice, text_of: Callable[[Choice], str], statistics: SessionStatistics
) -> Mapping[str, Any]:
    """Return the fact `PARSED` of a choice, and count it.

    Completions, which are not parsed, have none, and neither have ids that the tokenizer does not know, and texts of
    more than `MAX_TEXT` characters.
    """
    if plan.request.path == paths.COMPLETIONS:
        return {}
    try:
        text = text_of(choice)
    except (OverflowError, LookupError, TypeError, ValueError):
        return {}
    if len(text) > MAX_TEXT:
        return {}
    tools = tools_by_name(chat.tools_of(plan.grant.fields))
    reasons = account(text, choice.message, tools, cut=choice.finish not in OWN_ENDS, stop=choice.matched)
    if not reasons and NOT_IN_TEXT in choice.facts.get(SHOWN_OTHERWISE, ""):
        reasons = [INVALID_JSON]  # the engine closed what the model left open
    statistics.parsed.update(reasons or (WHOLE,))
    return {PARSED: reasons or WHOLE}


logger = logging.getLogger(__name__)

MAX_UNTRACED = 1000  # the most untraced requests that a session lists; the log has all
UNTRACED_BYTES = 1024  # the approximate size of each
LENGTH = "length"  # the finish reason of an answer that reached its token limit
MAX_MODEL = 256  # the most characters kept of a model's name
TURN_BYTES = 2496  # the approximate size of a turn without its arrays and messages


class TurnRecorder:
    """The recorder of all sessions.

    Args:
        is_special: returns True for special tokens such as `<|im_end|>`.
        decode: decodes token ids to text, with special tokens.
        now: returns Unix seconds.
        run: counts the recorded tokens for the run's statistics.
    """

    def __init__(
        self,
        store: SessionStore,
        is_special: Callable[[int], bool],
        decode: Callable[[Sequence[int]], str],
        now: Callable[[], float],
        run: RunSeries | None = None,
    ) -> None:
        self.statistics = store.statistics
        self.written_ids = store.written_ids
        self._store = store
        self._is_special = is_special
        self._decode = decode
        self._now = now
        self._run = run or RunSeries(lambda: None)

    def record(
        self, plan: TurnPlan, choices: Sequence[Choice], facts: Mapping[str, Any], cache: int | None = None
    ) -> bool:
        """Record all choices of an answer, or none.

        Args:
            facts: facts that all choices share.
            cache: the prefix cache that the turn was sampled with, if known.

        Returns:
            False if the session was removed during the turn, so that nothing is recorded.

        Raises:
            UnusableAnswer: the answer cannot be recorded exactly.
            NotFound: the session and its running turns were deleted.
        """
        if any(nests_too_deep([each.message, each.facts, each.matched]) for each in choices):
            raise UnusableAnswer("the worker's answer cannot be recorded: it is nested too deep")
        request = plan.request
        prompts = _Prompts(request)
        parts = [(choice, prompts.piece_of(choice), _sampled_pieces(choice)) for choice in choices]
        parents = _parents_of(request, choices)
        session = request.session
        if session.ending.status is SessionStatus.DISCARDED:
            raise NotFound(f"session {session.id!r} was deleted")
        if session.ending.status.is_forgotten:
            return False
        fields = plan.grant.fields
        if isinstance(model := fields.get("model"), str):
            session.model = model[:MAX_MODEL]
        nbytes = prompts.nbytes
        held: dict[int, ParentMatch] = {}
        for place in parents:
            if id(place) not in held:
                held[id(place)], new = session.history.intern(place)
                nbytes += new
        tools, new = session.history.intern_tools(tools_of(fields) if request.parents[0].parent is None else None)
        nbytes += new
        requests: dict[int, int] = {}  # id of a prompt's piece to the number of its first turn
        for (choice, given, sampled), place in zip(parts, parents, strict=True):
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
                self.written_ids.keep(session.id, turn, plan.written)
        tokens = sum(len(piece) for _, _, sampled in parts for piece in sampled)
        session.settle(plan.grant.reservation, tokens, plan.repeat_key)
        if plan.grant.cut_by is not None and any(choice.finish == LENGTH for choice in choices):
            self._store.end(session, plan.grant.cut_by)
        self._store.account(session, nbytes)
        new, reused = prompts.tokens, request.prompt.kept if request.prompt is not None else 0
        self.statistics.given_tokens += new
        self.statistics.reused_tokens += reused
        for turn in session.turns[len(session.turns) - len(choices) :]:
            cached = turn.facts.get("cached_tokens") if new or reused else None
            reason = reason_name(session.history.classify(turn).reason)
            if session.is_evaluation:
                self._run.evaluate(_by_version(turn.sampled))
                continue
            self._run.record(_by_version(turn.sampled), given=new, reused=reused, cached=cached, reason=reason)
            new = reused = 0  # count the prompt once for all choices
        return True

    def check_prompts(self, request: AgentRequest, choices: Sequence[Choice]) -> None:
        """Compare the prompt ids in the engine's answer with the ids that were sent.

        Raises:
            UnusableAnswer: the ids differ, or the answer to a root has none.
        """
        prompts = _Prompts(request)
        for choice in choices:
            prompts.piece_of(choice)

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
        tokens = (0 if prompt is None else prompt.kept) + len(given) + sum(map(len, sampled))
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
                **parsed_facts(plan, choice, self._parsed_text_of, self.statistics),
                "matched": choice.matched,
                "asked_at": asked.asked_at,
                "answered_at": self._now(),
                "turn_id": plan.turn_id,
                "streamed": asked.stream,
                **({"asked_for": plan.grant.asked_for} if plan.grant.asked_for else {}),
            },
        )

    def text_of(self, choice: Choice) -> str:
        """Return the text that a choice sampled, with special tokens except one at the end.

        Raises:
            UnusableAnswer: ids, logprobs and versions of the choice do not fit each other.
        """
        _sampled_pieces(choice)
        return self._text_of(choice)

    def _text_of(self, choice: Choice) -> str:
        if choice.text is None:
            ended = len(choice.ids) and self._is_special(choice.ids[-1])
            choice.text = self._decode(choice.ids[:-1] if ended else choice.ids)
        return choice.text

    def _parsed_text_of(self, choice: Choice) -> str:
        """Return the text that the engine parses: without the token that ended it, an ordinary one too."""
        last = int(choice.ids[-1]) if len(choice.ids) else None
        if last is None or choice.matched != last or self._is_special(last):
            return self._text_of(choice)
        return self._decode(choice.ids[:-1])

    def _ended_itself(self, choice: Choice, sampled: Sequence[Piece]) -> bool:
        """Return True if the last token is the model's own end of turn.

        With tool calls the engine does not report which token matched, so any special token counts.
        """
        if not sampled:
            return False
        last = int(sampled[-1].tokens[-1])
        if choice.finish == "tool_calls":
            return self._is_special(last)
        return choice.finish == "stop" and choice.matched == last

    def note_untraced(self, path: str, session: Session, reason: str, request_id: str) -> None:
        """List and log a request of the session that is not recorded."""
        self.statistics.untraced += 1
        if len(session.untraced) < MAX_UNTRACED:
            self._store.account(session, UNTRACED_BYTES)
            session.untraced.append({"path": path, "reason": reason, "request_id": request_id, "at": self._now()})
        fields = {"session_id": session.id, "path": path, "reason": reason, "request_id": request_id}
        logger.warning("turn_not_traced", extra={"fields": fields})


def _by_version(pieces: Iterable[Piece]) -> Counter[str | None]:
    """Return the number of tokens that each weight version sampled."""
    tokens: Counter[str | None] = Counter()
    for piece in pieces:
        tokens[piece.version] += len(piece)
    return tokens


def _sampled_pieces(choice: Choice) -> tuple[Piece, ...]:
    """Return the sampled tokens of a choice.

    Raises:
        UnusableAnswer: ids, logprobs and versions do not fit each other.
    """
    try:
        return choice.pieces()
    except (InvalidTrajectory, UnreadableAnswer) as error:
        raise UnusableAnswer(f"the worker's answer cannot be recorded: {error}") from None


def _parents_of(request: AgentRequest, choices: Sequence[Choice]) -> list[ParentMatch]:
    """Return the parent of each choice. The answer to a batch has all choices of the first prompt first, and so on.

    Raises:
        UnusableAnswer: the prompts of a batch have different numbers of choices.
    """
    parents = request.parents
    if len(parents) == 1:
        return [parents[0]] * len(choices)
    each, rest = divmod(len(choices), len(parents))
    if rest or not all(0 <= choice.index < len(choices) for choice in choices):
        raise UnusableAnswer(f"the worker's answer has {len(choices)} choices for {len(parents)} prompts")
    return [parents[choice.index // each] for choice in choices]


class _Prompts:
    """The prompt pieces of one answer's choices; choices with the same prompt share a piece."""

    def __init__(self, request: AgentRequest) -> None:
        self._prompt = request.prompt
        self._pieces: list[tuple[Sequence[int], Piece]] = []

    @property
    def tokens(self) -> int:
        """The number of prompt tokens behind the parent's, each prompt counted once."""
        return sum(map(len, self._distinct()))

    @property
    def nbytes(self) -> int:
        """The size of these pieces in bytes."""
        return sum(piece.nbytes for piece in self._distinct())

    def _distinct(self) -> list[Piece]:
        return [self._prompt.given] if self._prompt is not None else [piece for _, piece in self._pieces]

    def piece_of(self, choice: Choice) -> Piece:
        """Return the prompt piece of a choice, behind its parent's tokens.

        Raises:
            UnusableAnswer: the engine returned no prompt ids, or other ids than it was sent.
        """
        if self._prompt is not None:
            if choice.prompt is not None and not np.array_equal(np.asarray(choice.prompt), self._prompt.ids()):
                raise UnusableAnswer("the worker reports a prompt with other ids than it was sent")
            return self._prompt.given
        if not choice.prompt:
            raise UnusableAnswer("the worker's answer does not contain the ids of the prompt")
        for ids, piece in self._pieces:
            if ids is choice.prompt or ids == choice.prompt:
                return piece
        try:
            piece = Piece.given(choice.prompt)
        except InvalidTrajectory as error:
            raise UnusableAnswer(f"the worker's prompt ids are invalid: {error}") from None
        self._pieces.append((choice.prompt, piece))
        return piece
