"""One agent episode at the router: where the agent sends its requests, and the samples that come of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, TypedDict
from urllib.parse import quote
from uuid import uuid4

from miles_router.client.errors import InvalidReply, NotFound, RouterClientError, reading
from miles_router.client.transport import Request, Transport
from miles_router.trajectory import Sample
from miles_router.trajectory.sample import READERS, Format, Reward

logger = logging.getLogger(__name__)

NO_KEY = "none"  # OpenAI's clients want one


class SessionInfo(TypedDict):
    """One session in the router's list; times are Unix times."""

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
    """What a router answers to a request for an audit."""
    answer = await transport.json(Request("POST", path, {"limit": limit}, repeatable=True))
    if not isinstance(answer, dict) or not isinstance(answer.get("samples"), list):
        raise InvalidReply(f"POST {path} was answered without samples")
    return answer


class Session:
    """A session; `async with` deletes it at the end.

        async with await client.create_session() as session:
            await agent(session.base_url)
            samples = await session.collect(reward=1.0)

    Its methods raise `NotFound` where the router does not hold it (any more), and as the tree in `errors` says.
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
        #: Opens this session for its agent and nothing else, where its contract has `key`.
        self.own_key = own_key

    def __repr__(self) -> str:
        return f"<Session {self.id} at {self._router_url}>"

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes for `base_url`: `http://router/sessions/<id>/v1`."""
        return f"{self._router_url}{self._path}/v1"

    @property
    def anthropic_base_url(self) -> str:
        """What an Anthropic client takes for `base_url`, and `ANTHROPIC_BASE_URL`: the same without `/v1`."""
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
        """Delete the session. Where that fails the log says so: what was collected is not lost for it, and the router
        forgets idle sessions by itself."""
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
        """One turn without an OpenAI client: the chat completion as JSON. Further fields are OpenAI's and SGLang's,
        but for `stream`.

        Where its connection is lost before the answer begins, the turn is asked for again under the same `turn_id`,
        and the router answers it once.
        """
        if fields.get("stream"):
            raise ValueError("streams are for OpenAI clients: AsyncOpenAI(**session.openai)")
        headers = {"X-Turn-Id": turn_id or uuid4().hex}
        body = {"model": model, "messages": list(messages), **fields}
        answer: dict[str, Any] = await self._transport.json(
            Request("POST", f"{self._path}/v1/chat/completions", body, headers, repeatable=True)
        )
        return answer

    async def records(self, *, compact: bool = False) -> dict[str, Any]:
        """`{"session_id", "records", "metadata"}`: the turns, what was asked and answered, their tree.

        Args:
            compact: leave out what other records hold already: the history of each request, the ids and logprobs.
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
        reward: Reward = None,
        label: Any = None,
        metadata: Mapping[str, Any] | None = None,
        format: Format = "safetensors",
    ) -> list[Sample]:
        """The training samples, one for each branch; the session stays as it is.

        Args:
            max_seq_len: tokens a sample may have; longer ones are cut and `truncated`.
            branches: `all`, `last`, `drop-superseded`, or the dotted path of a policy that the router allows; by
                default all, and of `last_step` the last.
            build: `concat`: the turns of a branch in a row; or `last_step`: its last answer with the whole prompt.
            mask: which of the sampled tokens are in the loss: `all`, `last_turn`, `newest_weights`, `no_reasoning`, or
                a list of them, which leaves what all of them leave.
            side_calls: whether what a harness asks beside its main line (titles, probes, sub-agents) gives samples too;
                by default as the router's operator says, or else true.
            reward, label, metadata: carried by every sample.

        Raises:
            InvalidSample: a sample would break an invariant; none is given.
            UntracedEpisode: nothing that the agent asked was traced.
            ValueError: reward, label or metadata contain NaN or an infinity.
        """
        fields = {
            "format": format,
            "max_seq_len": max_seq_len,
            "branches": branches or (None if build == "last_step" else "all"),
            "build": build,
            "mask": mask,
            "side_calls": side_calls,
            "reward": reward,
            "label": label,
            "metadata": metadata,
        }
        body = {name: value for name, value in fields.items() if value is not None}
        data = await self._transport.bytes(Request("POST", f"{self._path}/samples", body, repeatable=True))
        with reading(f"{self._path}/samples"):
            return READERS[format](data)

    async def audit(self, *, limit: int = 8) -> dict[str, Any]:
        """What the engines say of the recorded tokens now, beside what was recorded: docs/audit.md has the fields.

        Args:
            limit: samples that are audited, the newest ones.
        """
        return await read_audit(self._transport, f"{self._path}/audit", limit)

    async def delete(self, *, abort: bool = True) -> None:
        """Forget it. What runs in it ends at its engine at once; with `abort=False` it finishes, and is dropped."""
        await self._transport.bytes(Request("DELETE", f"{self._path}?abort={str(abort).lower()}"))
