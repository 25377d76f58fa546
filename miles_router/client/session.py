"""One agent episode at the router: the URL to which the agent sends its requests, and the resulting samples."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, TypedDict
from urllib.parse import quote
from uuid import uuid4

from miles_router.client.errors import InvalidReply, NotFound, RouterClientError, convert_errors
from miles_router.client.transport import Request, Transport
from miles_router.trajectory import Sample
from miles_router.trajectory.sample import READERS, Format, Reward

logger = logging.getLogger(__name__)

NO_KEY = "none"  # OpenAI's clients require a key
#: A `model_id`, or that and `top_k`.
Teacher = str | Mapping[str, Any]


class SessionInfo(TypedDict):
    """One session in the router's list; times are Unix times in seconds."""

    session_id: str
    turns: int
    created_at: float
    last_used_at: float
    tokens: int


class EpisodeInfo(TypedDict):
    """One session (`kind` is `session`) or text rollout (`text`) that can be audited."""

    id: str
    kind: str
    turns: int
    last_used_at: float


async def read_audit(transport: Transport, path: str, limit: int) -> dict[str, Any]:
    """Request an audit and return the reply.

    Raises:
        InvalidReply: the reply has no samples.
    """
    answer = await transport.json(Request("POST", path, {"limit": limit}, repeatable=True))
    if not isinstance(answer, dict) or not isinstance(answer.get("samples"), list):
        raise InvalidReply(f"POST {path} was answered without samples")
    return answer


class Session:
    """A session; `async with` deletes it at the end.

        async with await client.create_session() as session:
            await agent(session.base_url)
            samples = await session.collect(reward=1.0)

    Its methods raise `NotFound` if the router does not have the session (any more), and else the errors in `errors`.
    """

    def __init__(
        self,
        transport: Transport,
        router_url: str,
        session_id: str,
        api_key: str | None = None,
        own_key: str | None = None,
    ) -> None:
        self.id = session_id
        self._transport = transport
        self._path = f"/sessions/{quote(session_id, safe='')}"
        self._router_url = router_url
        self._api_key = api_key
        #: A key for this session only, for its agent; None unless the contract has `key`.
        self.own_key = own_key

    def __repr__(self) -> str:
        return f"<Session {self.id} at {self._router_url}>"

    @property
    def base_url(self) -> str:
        """The `base_url` for an OpenAI client: `http://router/sessions/<id>/v1`."""
        return f"{self._router_url}{self._path}/v1"

    @property
    def anthropic_base_url(self) -> str:
        """The `base_url` for an Anthropic client (`ANTHROPIC_BASE_URL`): the same without `/v1`."""
        return f"{self._router_url}{self._path}"

    @property
    def openai(self) -> dict[str, str]:
        """`base_url` and `api_key` for an OpenAI client: `AsyncOpenAI(**session.openai)`."""
        return {"base_url": self.base_url, "api_key": self.own_key or self._api_key or NO_KEY}

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Delete the session. A failure is only logged: the collected samples stay valid, and the router forgets idle
        sessions by itself."""
        try:
            await self.delete()
        except NotFound:
            pass
        except RouterClientError as failure:
            logger.warning("session %s was not deleted: %s", self.id, failure)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        turn_id: str | None = None,
        model: str = "default",
        **fields: Any,
    ) -> dict[str, Any]:
        """Run one turn without an OpenAI client, and return the chat completion as JSON. Further fields are fields of
        OpenAI and SGLang, except `stream`.

        If the connection is lost before the reply begins, the turn is sent again with the same `turn_id`, and the
        router runs it once.
        """
        if fields.get("stream"):
            raise ValueError("chat() does not stream; use AsyncOpenAI(**session.openai) for streams")
        headers = {"X-Turn-Id": turn_id or uuid4().hex}
        body = {"model": model, "messages": list(messages), **fields}
        answer: dict[str, Any] = await self._transport.json(
            Request("POST", f"{self._path}/v1/chat/completions", body, headers, repeatable=True)
        )
        return answer

    async def records(self, *, compact: bool = False) -> dict[str, Any]:
        """Return `{"session_id", "records", "metadata"}`: the tree of turns with their requests and replies.

        Args:
            compact: leave out what other records contain already: the history of each request, the ids and logprobs.
        """
        path = f"{self._path}?form=compact" if compact else self._path
        records: dict[str, Any] = await self._transport.json(Request("GET", path, repeatable=True))
        return records

    async def collect(
        self,
        *,
        max_seq_len: int | None = None,
        branches: str | None = None,
        build: str | None = None,
        mask: str | Sequence[str] | None = None,
        side_calls: bool | None = None,
        per_token: Sequence[str] | None = None,
        reward: Reward = None,
        label: Any = None,
        metadata: Mapping[str, Any] | None = None,
        teacher: Teacher | None = None,
        format: Format = "safetensors",
    ) -> list[Sample]:
        """Return the training samples, one for each branch; the session stays as it is.

        Args:
            max_seq_len: most tokens of a sample; longer ones are cut and `truncated`.
            branches: `all`, `last`, `drop-superseded`, or the dotted path of a policy that the router allows; by
                default `all`, for `last_step` the last.
            build: `concat`: all turns of a branch in a row; or `last_step`: its last reply with the whole prompt.
            mask: which of the sampled tokens are in the loss: `all`, `last_turn`, `newest_weights`, `no_reasoning`, or
                a list of them, which keeps the tokens that all of them keep.
            side_calls: whether requests of a harness outside its main conversation (titles, probes, sub-agents) give
                samples too; by default as the router is configured, or else True.
            per_token: names of `set_rewards` that become arrays in `Sample.per_token`, such as `advantage`.
            reward, label, metadata: set on every sample.
            teacher: the `model_id` of a pool whose logprobs of the sampled tokens become `sample.teacher`, or
                `{"model": ..., "top_k": ...}` for its likeliest tokens too (docs/sessions-reference.md).

        Raises:
            InvalidSample: a sample would break an invariant, or no request of the agent was traced; no sample is
                returned.
            ValueError: reward, label or metadata contain NaN or an infinity.
        """
        fields = {
            "format": format,
            "max_seq_len": max_seq_len,
            "branches": branches or (None if build == "last_step" else "all"),
            "build": build,
            "mask": mask,
            "side_calls": side_calls,
            "per_token": None if per_token is None else [*per_token],
            "reward": reward,
            "label": label,
            "metadata": metadata,
            "teacher": teacher,
        }
        body = {name: value for name, value in fields.items() if value is not None}
        data = await self._transport.bytes(Request("POST", f"{self._path}/samples", body, repeatable=True))
        with convert_errors(f"{self._path}/samples"):
            return READERS[format](data)

    async def set_rewards(self, *rewards: Mapping[str, Any]) -> None:
        """Set rewards or other values of turns, segments and token spans, all of them or none:

            await session.set_rewards({"turn": 3, "reward": 0.5}, {"turn": 3, "span": [2, 9], "name": "advantage",
            "value": -0.2}, {"segment": 0, "name": "verdict", "value": "solved"})

        A later value of the same name and place replaces the earlier. `records` has the numbers of turns.

        Raises:
            NotFound: there is no such session, turn or segment.
            ValueError: a value contains NaN or an infinity.
        """
        await self._transport.json(Request("POST", f"{self._path}/rewards", [*rewards], repeatable=True))

    async def audit(self, *, limit: int = 8) -> dict[str, Any]:
        """Return a comparison of the recorded tokens with what the engines compute for them now.

        docs/check-your-tokens.md explains the fields.

        Args:
            limit: the number of samples to audit, the newest ones.
        """
        return await read_audit(self._transport, f"{self._path}/audit", limit)

    async def delete(self, *, abort: bool = True) -> None:
        """Delete the session. Its running generations are aborted at once; with `abort=False` they finish and are
        discarded."""
        await self._transport.bytes(Request("DELETE", f"{self._path}?abort={str(abort).lower()}"))
