"""The values of one turn between the steps of `run_turn`, each made once by one step."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from middleware_hub.openai_session.episodes.contract import SessionStatus
from middleware_hub.openai_session.faces.face import Face
from middleware_hub.openai_session.sessions.agent_request import AgentRequest
from middleware_hub.openai_session.sessions.replies import RepeatKey
from middleware_hub.openai_session.turns.raw_turn import RawTurn
from miles_router.engines.facts import Facts
from miles_router.engines.openai.choices import Choice, OpenAIEndpoint
from miles_router.errors import BadRequest
from miles_router.middlewares import Exchange, Message, Receive, Router, Scope, first_header
from miles_router.middlewares.rows import RowDeliveries

MAX_TURN_ID = 256


@dataclass(frozen=True)
class TurnRequest:
    """The HTTP request of one turn.

    Attributes:
        parsed: the JSON of the body.
        turn_id: the agent's name for the turn, or for the turn of which this is a step (`X-Turn-Id`).
        repeat_key: equal for a request and its repetitions; None without a turn id.
    """

    face: Face
    exchange: Exchange
    scope: Scope
    receive: Receive
    body: bytes
    parsed: Any
    turn_id: str | None
    repeat_key: RepeatKey | None

    @classmethod
    def read(cls, face: Face, scope: Scope, receive: Receive, body: bytes, parsed: Any) -> TurnRequest:
        """Read the headers of a request.

        Raises:
            BadRequest: `X-Turn-Id` is too long.
        """
        turn_id = turn_id_of(scope)
        key = None if turn_id is None else repeat_key(turn_id, face.path, body)
        return cls(face, Exchange.of(scope), scope, receive, body, parsed, turn_id, key)


def turn_id_of(scope: Scope) -> str | None:
    """Return the agent's name for a turn.

    Raises:
        BadRequest: it is too long.
    """
    value = first_header(scope["headers"], b"x-turn-id")
    if value is not None and len(value) > MAX_TURN_ID:
        raise BadRequest(f"X-Turn-Id is longer than {MAX_TURN_ID} bytes")
    return value.decode("latin-1") if value else None


def repeat_key(turn_id: str, path: str, body: bytes) -> RepeatKey:
    """Return what a request and its repetitions have in common."""
    return turn_id, path, blake2b(body, digest_size=16).digest()


@dataclass(frozen=True)
class TurnGrant:
    """A request as the contract of its session allows it.

    Attributes:
        fields: the request with what the contract fixes and leaves.
        asked_for: what the agent wanted where the contract has something else.
        cut_by: the limit that made the answer shorter than the agent wanted, as the status that the session ends with.
        reservation: the key of the tokens that the ledger of the episode has reserved; None where nothing is measured.
    """

    fields: Mapping[str, Any]
    asked_for: Mapping[str, Any] = field(default_factory=dict)
    cut_by: SessionStatus | None = None
    reservation: object = None


@dataclass(frozen=True)
class TurnPlan:
    """What the engine is asked, and what the recorded turn takes from the request.

    Attributes:
        streams: whether the engine is asked for a stream; an agent's stream may be written from a whole answer.
        deliveries: of the rows that are captured.
        written: the ids of the prompt as JSON, in pieces; empty where the engine is given none.
        side_call: whether the agent says that the turn is not of its main line.
        raw: how the answer is read here; None where the engine reads it.
    """

    request: AgentRequest
    grant: TurnGrant
    streams: bool = False
    deliveries: RowDeliveries = field(default_factory=RowDeliveries)
    written: Sequence[bytes] = ()
    turn_id: str | None = None
    repeat_key: RepeatKey | None = None
    side_call: bool = False
    raw: RawTurn | None = None


@dataclass(frozen=True)
class SampledAnswer:
    """What was sampled, and what the agent gets for it.

    Attributes:
        choices: None where a stream does not tell what recording needs: the turn passes untraced.
        prompt_tokens: the tokens of all prompts that the engine says it read; None where it does not say.
        start: the head of a whole reply; None where it was given.
        error: the agent is told this in place of the end: the turn is recorded, and its finish reason has no word in
            the agent's API.
    """

    choices: Sequence[Choice] | None
    prompt_tokens: int | None
    start: Message | None = None
    error: Exception | None = None


class ProcessShortfalls(dict[str, str]):
    """What the streams of one engine process do not tell, by endpoint. Kept with its facts, and gone with them."""

    def note(self, path: str, reason: str) -> str:
        """Keep a reason, and log it once."""
        if path not in self:
            self[path] = reason
            logger.warning("streams_are_buffered", extra={"fields": {"path": path, "reason": reason}})
        return self[path]


class StreamFacts:
    """Tells by the facts of the worker that will answer whether a streamed turn would tell all that recording needs,
    and adds what a stream has shown."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def fall_short(self, candidates: Sequence[Facts], endpoint: OpenAIEndpoint) -> bool:
        """Whether a stream of one of these engines would not tell all. Then the turn is generated whole, and given as a
        stream afterwards."""
        shortfalls = [_shortfall(facts, endpoint) for facts in candidates]
        return any(reason is not None for reason in shortfalls)

    async def learn(self, url: str, path: str, reason: str) -> None:
        """A stream of this worker's has fallen short, as others of the same process would."""
        (await self._router.fleet.facts(url)).learned(ProcessShortfalls).note(path, reason)

    async def candidates(self, turn: AgentRequest) -> Sequence[Facts]:
        """The facts of the worker that a session is tied to while that is routable; before, of all that may answer."""
        fleet, pool, turns = self._router.fleet, self._router.pool, turn.session.turns
        last = pool.find(turns[-1].facts["worker"] or "") if turns else None
        if last is not None and last in pool.routable:
            return [await fleet.facts(last.url)]
        return await fleet.all_facts()


def _shortfall(facts: Facts, endpoint: OpenAIEndpoint) -> str | None:
    known = facts.learned(ProcessShortfalls)
    reason = known.get(endpoint.path) or endpoint.shortfall(facts)
    return None if reason is None else known.note(endpoint.path, reason)


logger = logging.getLogger(__name__)
