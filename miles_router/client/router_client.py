"""`RouterClient`: everything that rollout code and trainers ask of a router."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import Any
from urllib.parse import quote, urlsplit

import orjson

from miles_router.client.answers import Generation
from miles_router.client.control import FleetControl
from miles_router.client.errors import ConnectionLost, InvalidReply, read_error, reading
from miles_router.client.session import EpisodeInfo, Session, SessionInfo, read_audit
from miles_router.client.transport import DEFAULT_RETRIES, OwnerTransport, Pool, Request, Retries, Transport
from miles_router.engines.events import DATA, DONE, EventReader
from miles_router.trajectory import Malformed, Retrieved
from miles_router.trajectory.retrieved import read_safetensors
from miles_router.trajectory.safetensors import unpack
from miles_router.trajectory.sample import ShapedRows

BINARY = "application/octet-stream"


class RouterClient(FleetControl):
    """A client of one router, for one event loop; `async with`, or `close()` at the end.

        async with RouterClient("http://127.0.0.1:30000") as client:
            generation = await client.generate("Once", sampling_params={"max_new_tokens": 64})
            tokens = await client.retrieve(rid=generation.rid)

    Every method raises errors of the tree in `miles_router.client.errors`. What is safe to ask again is asked again:
    see `Retries`.

    Args:
        base_url: `http://` or `https://`, host, and a path prefix if the router stands behind one.
        api_key: for generations and sessions, where the router has `--api-key`.
        admin_api_key: for control of the fleet, where it differs.
        timeout: seconds a request may take in all, its waiting for a paused fleet included; None: as long as it takes.
        connect_timeout: seconds in which a connection must be there.
        max_connections: requests under way at a time, control of the fleet not counted; more of them wait here. Each
            is a file descriptor. 0: without a bound.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        timeout: float | None = None,
        connect_timeout: float = 30.0,
        max_connections: int = 4096,
        retries: Retries = DEFAULT_RETRIES,
    ) -> None:
        self.base_url = _checked(base_url)
        self._api_key = api_key
        self._transport = Transport(Pool(self.base_url, api_key, timeout, connect_timeout, max_connections), retries)
        admin = Pool(self.base_url, admin_api_key or api_key, timeout, connect_timeout, max_connections=0)
        super().__init__(Transport(admin, retries))

    def __repr__(self) -> str:
        return f"<RouterClient of {self.base_url}>"

    async def __aenter__(self) -> RouterClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection; requests under way break off."""
        await self._transport.close()
        await self._admin.close()

    # Generations

    async def generate(
        self,
        text: str | None = None,
        *,
        input_ids: Sequence[int] | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        rid: str | None = None,
        routing_key: str | None = None,
        **fields: Any,
    ) -> Generation:
        """One generation, of a text or of ids. Several are several calls, at once.

        Args:
            rid: the engine's id for it, for `abort` and `retrieve`; else the engine makes one.
            routing_key: requests with the same key go to the same worker, which has their common prefix in its cache.
            fields: SGLang's, as `return_logprob=True`.
        """
        body = _generate_body(text, input_ids, sampling_params, rid, fields)
        return Generation.from_json(await self._transport.json(_generate(body, routing_key)))

    async def generate_stream(
        self,
        text: str | None = None,
        *,
        input_ids: Sequence[int] | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        rid: str | None = None,
        routing_key: str | None = None,
        **fields: Any,
    ) -> AsyncGenerator[Generation, None]:
        """As `generate`, event by event: each is everything so far, or what is new in it where the workers run with
        `--incremental-streaming-output`. The last has a `finish_reason`.

        Leave early through `contextlib.aclosing`, which ends the generation; a mere `break` ends it at some later time.

        Raises:
            ConnectionLost: the stream ended without its end mark: what came of it is not the whole.
            ErrorReply: the engine said so inside the stream.
        """
        body = {**_generate_body(text, input_ids, sampling_params, rid, fields), "stream": True}
        async with self._transport.open(_generate(body, routing_key)) as response:
            events = EventReader()
            async for chunk in response.content.iter_any():
                for event in events.feed(chunk):
                    if event.startswith(DATA + DONE):
                        return
                    yield _event(event)
        raise ConnectionLost("POST /generate: the stream ended without [DONE]")

    async def retrieve(
        self, text: str | None = None, *, rid: str | None = None, strict: bool = True, reward: float | None = None
    ) -> Retrieved:
        """The exact tokens of a text that was generated through `RadixTreeMiddleware`: the prompt that was sent and
        the text that came back. `rid` (`Generation.rid`) tells siblings of equal text apart; send it always.

        Args:
            strict: False gives the encoding of what nobody generated, with mask 0, instead of `NotFound`.
            reward: for the dashboard and `/router/run`, which count it each time that it is sent.

        Raises:
            NotFound: no such `rid` is held, or with `strict` the text was not recorded from end to end.
            InvalidSample: the arrays are none that a rollout can have.
        """
        fields = {"text": text, "rid": rid, "strict": strict, "reward": reward}
        body = {name: value for name, value in fields.items() if value is not None}
        request = Request("POST", "/retrieve_from_text", body, {"Accept": BINARY}, repeatable=True)
        data = await self._transport.bytes(request)
        with reading("/retrieve_from_text"):
            return read_safetensors(data)

    async def routed_experts(
        self,
        *,
        rid: str | None = None,
        text: str | None = None,
        session_id: str | None = None,
        leaf: int | None = None,
        start: int = 0,
        stop: int | None = None,
    ) -> ShapedRows:
        """The experts that routed each token of one rollout, unsigned integers [stop - start, layers, top_k]: row i is
        about token i, and the last token has none. For a router with `RoutedExpertsMiddleware`.

        Args:
            rid: of a generation (`Generation.rid`).
            text: of the newest generation with exactly this text, prompt included.
            session_id, leaf: of a sample of a session; `leaf` is its `metadata["leaf"]`, needed where there are more.
            start, stop: rows; by default all.

        Raises:
            NotFound: there is no such rollout, or its rows never came, did not fit or have been evicted.
            ErrorReply: not exactly one rollout is named, or it does not have these rows.
        """
        return await self._rows(
            "routed_experts", rid=rid, text=text, session_id=session_id, leaf=leaf, start=start, stop=stop
        )

    async def indexer_topk(
        self,
        *,
        rid: str | None = None,
        text: str | None = None,
        session_id: str | None = None,
        leaf: int | None = None,
        start: int = 0,
        stop: int | None = None,
    ) -> ShapedRows:
        """The positions that sparse attention chose for each token of one rollout, integers [stop - start, layers,
        top_k], -1 where there are fewer. As `routed_experts`, for a router with `IndexerTopkMiddleware`."""
        return await self._rows(
            "indexer_topk", rid=rid, text=text, session_id=session_id, leaf=leaf, start=start, stop=stop
        )

    async def _rows(self, kind: str, **fields: object) -> ShapedRows:
        body = {"format": "safetensors", **{name: value for name, value in fields.items() if value is not None}}
        data = await self._transport.bytes(Request("POST", f"/{kind}", body, repeatable=True))
        with reading(f"/{kind}"):
            arrays, _ = unpack(data)
            if kind not in arrays:
                raise Malformed(f"it has no {kind}")
            return arrays[kind]

    async def request(
        self, method: str, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None
    ) -> Any:
        """Any other request that the router answers or forwards, with JSON both ways; `path` is percent-encoded."""
        return await self._transport.json(Request(method, path, body, headers or {}))

    # Sessions

    async def create_session(
        self,
        session_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        contract: Mapping[str, Any] | None = None,
    ) -> Session:
        """A new session, of an id that the router makes unless one is given. `metadata` is kept with it; `contract` is
        what its agent is held to, as docs/agents.md says.

        Raises:
            SessionExists: the id is taken.
        """
        fields = {"session_id": session_id, "metadata": metadata, "contract": contract}
        body = {name: value for name, value in fields.items() if value is not None}
        answer = await self._transport.json(Request("POST", "/sessions", body))
        if not isinstance(answer, dict) or not isinstance(answer.get("session_id"), str):
            raise InvalidReply("POST /sessions was answered without a session_id")
        transport, owner_url = self._transport, answer.get("owner_url")
        if isinstance(owner_url, str) and urlsplit(owner_url).hostname == urlsplit(self.base_url).hostname:
            transport = OwnerTransport(transport, owner_url)
        return Session(transport, self.base_url, answer["session_id"], self._api_key, own_key=answer.get("api_key"))

    def session(self, session_id: str) -> Session:
        """A session that is there already; nothing is asked."""
        return Session(self._transport, self.base_url, session_id, self._api_key)

    async def sessions(self) -> list[SessionInfo]:
        """The sessions that the router holds."""
        return await self._transport.listed("/sessions", "sessions")

    # Episodes: sessions and text rollouts

    async def episodes(self) -> list[EpisodeInfo]:
        """The sessions and text rollouts that `audit` takes."""
        return await self._transport.listed("/episodes", "episodes")

    async def audit(self, episode_id: str, *, limit: int = 8) -> dict[str, Any]:
        """What the engines say of an episode's recorded tokens now, beside what was recorded: docs/audit.md has the
        fields.

        Args:
            limit: samples that are audited, the newest ones.

        Raises:
            NotFound: it is not held (any more).
        """
        return await read_audit(self._transport, f"/episodes/{quote(episode_id, safe='')}/audit", limit)


def _checked(base_url: str) -> str:
    """The URL without a slash at its end.

    Raises:
        ValueError: it is not the URL of a router.
    """
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"base_url must be http:// or https:// and name a host, not {base_url!r}")
    return base_url.rstrip("/")


def _generate_body(
    text: str | None,
    input_ids: Sequence[int] | None,
    sampling_params: Mapping[str, Any] | None,
    rid: str | None,
    fields: Mapping[str, Any],
) -> dict[str, Any]:
    """The request of one generation.

    Raises:
        ValueError: it would generate nothing, or several.
    """
    if (text is None) == (input_ids is None):
        raise ValueError("text or input_ids is required, and not both")
    if (sampling_params or {}).get("n", 1) != 1:
        raise ValueError("n must be 1: several generations of one prompt are several calls at once, see rollouts.group")
    body = {"text": text, "input_ids": input_ids, "sampling_params": sampling_params, "rid": rid, **fields}
    return {name: value for name, value in body.items() if value is not None}


def _generate(body: Mapping[str, Any], routing_key: str | None) -> Request:
    return Request("POST", "/generate", body, {} if routing_key is None else {"X-SMG-Routing-Key": routing_key})


def _event(event: bytes) -> Generation:
    """What one event of a stream says.

    Raises:
        ErrorReply: the engine refuses, or gives up; SGLang says so with status 200, inside the stream.
    """
    data = event[len(DATA) :] if event.startswith(DATA) else event
    try:
        answer = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidReply(f"no event of /generate: {error}") from None
    if isinstance(answer, dict) and "error" in answer:
        code = answer["error"].get("code") if isinstance(answer["error"], dict) else None
        raise read_error(code if isinstance(code, int) else 0, {}, data)
    return Generation.from_json(answer)
