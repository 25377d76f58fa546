"""The values that the steps of `run_turn` pass on: the request, the grant, the plan and the sampled answer."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from middleware_hub.openai_session.agent_apis.agent_api import AgentApi
from middleware_hub.openai_session.episodes.contract import SessionStatus
from middleware_hub.openai_session.sessions.replies import RepeatKey
from middleware_hub.openai_session.sessions.session import AgentRequest
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
        turn_id: the agent's id for the turn, or for the turn that this request is a step of (`X-Turn-Id`).
        repeat_key: equal for a request and its repetitions; None without a turn id.
    """

    api: AgentApi
    exchange: Exchange
    scope: Scope
    receive: Receive
    body: bytes
    parsed: Any
    turn_id: str | None
    repeat_key: RepeatKey | None

    @classmethod
    def read(cls, api: AgentApi, scope: Scope, receive: Receive, body: bytes, parsed: Any) -> TurnRequest:
        """Return the turn request with its turn id and repeat key.

        Raises:
            BadRequest: `X-Turn-Id` is too long.
        """
        turn_id = turn_id_of(scope)
        key = None if turn_id is None else repeat_key(turn_id, api.path, body)
        return cls(api, Exchange.of(scope), scope, receive, body, parsed, turn_id, key)


def turn_id_of(scope: Scope) -> str | None:
    """Return the agent's id for a turn, from `X-Turn-Id`; None without one.

    Raises:
        BadRequest: the id is too long.
    """
    value = first_header(scope["headers"], b"x-turn-id")
    if value is not None and len(value) > MAX_TURN_ID:
        raise BadRequest(f"X-Turn-Id is longer than {MAX_TURN_ID} bytes")
    return value.decode("latin-1") if value else None


def repeat_key(turn_id: str, path: str, body: bytes) -> RepeatKey:
    """Return a key that is equal for a request and its repetitions."""
    return turn_id, path, blake2b(body, digest_size=16).digest()


@dataclass(frozen=True)
class TurnGrant:
    """A request as the contract of its session allows it.

    Attributes:
        fields: the request with the contract's fixed values and token limit.
        asked_for: the agent's own values that the contract replaced.
        cut_by: the limit that made the answer shorter than requested, as the status that the session will end with.
        reservation: the key of the tokens reserved in the episode's ledger; None if the contract has no budget.
    """

    fields: Mapping[str, Any]
    asked_for: Mapping[str, Any] = field(default_factory=dict)
    cut_by: SessionStatus | None = None
    reservation: object = None


@dataclass(frozen=True)
class TurnPlan:
    """The plan of a turn: how the engine is asked, and which parts of the request the recorded turn keeps.

    Attributes:
        streams: whether the engine is asked for a stream; an agent's stream may be written from a whole answer.
        deliveries: the deliveries of captured rows.
        written: the prompt ids as JSON, in pieces; empty if the engine gets messages.
        side_call: whether the agent reports that the turn does not belong to its main line.
        raw: how the router parses the answer; None if the engine parses it.
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
    """The sampled choices, and the agent's reply to them.

    Attributes:
        choices: None if a stream lacks data that recording needs: the turn is not recorded.
        prompt_tokens: the number of tokens in all prompts, as the engine reports it; None if it does not.
        start: the head of a whole reply; None if it was already sent.
        error: the agent gets this error in place of the end. The turn is recorded, but the agent's API cannot express
            its finish reason.
    """

    choices: Sequence[Choice] | None
    prompt_tokens: int | None
    start: Message | None = None
    error: Exception | None = None


class ProcessShortfalls(dict[str, str]):
    """The reasons why streams of one engine process cannot be recorded, by endpoint; kept with the process's facts."""

    def note(self, path: str, reason: str) -> str:
        """Store the first reason for a path, log it once, and return the stored reason."""
        if path not in self:
            self[path] = reason
            logger.warning("streams_are_buffered", extra={"fields": {"path": path, "reason": reason}})
        return self[path]


class StreamFacts:
    """A lookup of whether a worker's streams contain all data that recording needs; it learns from failed streams."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def fall_short(self, candidates: Sequence[Facts], endpoint: OpenAIEndpoint) -> bool:
        """Return True if streams of one of these engines lack data for recording.

        The turn is then sampled as a whole answer, and streamed to the agent afterwards.
        """
        shortfalls = [_shortfall(facts, endpoint) for facts in candidates]
        return any(reason is not None for reason in shortfalls)

    async def learn(self, url: str, path: str, reason: str) -> None:
        """Remember that streams of this worker's process cannot be recorded."""
        (await self._router.fleet.facts(url)).learned(ProcessShortfalls).note(path, reason)

    async def candidates(self, turn: AgentRequest) -> Sequence[Facts]:
        """Return the facts of the workers that may answer: the session's last worker if routable, else all workers."""
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
