"""`RouterClient`: all requests that rollout code and trainers send to a router."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import Any
from urllib.parse import quote, urlsplit

import orjson

from miles_router.client.answers import Generation
from miles_router.client.control import FleetControl
from miles_router.client.errors import ConnectionLost, InvalidReply, convert_errors, read_error
from miles_router.client.session import EpisodeInfo, Session, SessionInfo, Teacher, read_audit
from miles_router.client.transport import DEFAULT_RETRIES, OwnerTransport, Pool, Request, Retries, Transport
from miles_router.engines.events import DATA, DONE, EventReader
from miles_router.trajectory import Malformed, Retrieved
from miles_router.trajectory.retrieved import read_safetensors
from miles_router.trajectory.safetensors import unpack
from miles_router.trajectory.sample import ShapedRows

BINARY = "application/octet-stream"


class RouterClient(FleetControl):
    """A client of one router, for one event loop; use `async with`, or call `close()` at the end.

        async with RouterClient("http://127.0.0.1:30000") as client:
            generation = await client.generate("Once", sampling_params={"max_new_tokens": 64})
            tokens = await client.retrieve(rid=generation.rid)

    Every method raises the errors in `miles_router.client.errors`. Requests that are safe to repeat are repeated: see
    `Retries`.

    Args:
        base_url: `http://` or `https://`, host, and a path prefix if the router is behind a proxy with one.
        api_key: for generations and sessions, if the router has `--api-key`.
        admin_api_key: for control of the fleet, if it differs.
        timeout: seconds a request may take in all, waiting for a paused fleet included; None: no limit.
        connect_timeout: seconds in which a connection must be established.
        max_connections: requests sent at a time, control of the fleet not counted; more of them wait here. Each uses a
            file descriptor. 0: no limit.
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
        self.base_url = _check_base_url(base_url)
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
        """Close every connection; requests in progress fail."""
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
        """Generate once, from a text or from token ids. For several generations, make several calls at once.

        Args:
            rid: the engine's id for the generation, for `abort` and `retrieve`; by default the engine makes one.
            routing_key: requests with the same key go to the same worker, which has their common prefix in its
                cache.
            fields: further fields of SGLang's request, such as `return_logprob=True`.
        """
        body = _generate_body(text, input_ids, sampling_params, rid, fields)
        return Generation.from_json(await self._transport.json(_generate_request(body, routing_key)))

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
        """Generate like `generate`, and yield each event of the stream. An event has all output so far, or only the new
        output if the workers run with `--incremental-streaming-output`. The last event has a `finish_reason`.

        To leave early, use `contextlib.aclosing`, which ends the generation at once; a mere `break` ends it some time
        later.

        Raises:
            ConnectionLost: the stream ended without its end mark, so the output is incomplete.
            ErrorReply: the engine sent an error inside the stream.
        """
        body = {**_generate_body(text, input_ids, sampling_params, rid, fields), "stream": True}
        async with self._transport.open(_generate_request(body, routing_key)) as response:
            events = EventReader()
            async for chunk in response.content.iter_any():
                for event in events.feed(chunk):
                    if event.startswith(DATA + DONE):
                        return
                    yield _parse_event(event)
        raise ConnectionLost("POST /generate: the stream ended without [DONE]")

    async def retrieve(
        self,
        text: str | None = None,
        *,
        rid: str | None = None,
        strict: bool = True,
        reward: float | None = None,
        teacher: Teacher | None = None,
    ) -> Retrieved:
        """Return the exact tokens of a text that was generated through `RadixTreeMiddleware`: the prompt that was sent
        plus the text that was returned. Always send `rid` (`Generation.rid`): it distinguishes generations with equal
        text.

        Args:
            strict: False returns an encoding with mask 0 for text that was not generated, instead of raising
                `NotFound`.
            reward: for the dashboard and `/router/run`, which count it each time that it is sent.
            teacher: as in `Session.collect`, for `retrieved.teacher`.

        Raises:
            NotFound: the router does not have `rid`, or with `strict` the text was not recorded from end to end.
            InvalidSample: the arrays do not fit together as a rollout.
        """
        fields = {"text": text, "rid": rid, "strict": strict, "reward": reward, "teacher": teacher}
        body = {name: value for name, value in fields.items() if value is not None}
        request = Request("POST", "/retrieve_from_text", body, {"Accept": BINARY}, repeatable=True)
        data = await self._transport.bytes(request)
        with convert_errors("/retrieve_from_text"):
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
        """Return the experts of each token of one rollout, unsigned integers [stop - start, layers, top_k].
        Row i is about token i, and the last token has none. For a router with `RoutedExpertsMiddleware`.

        Args:
            rid: selects a generation (`Generation.rid`).
            text: selects the newest generation with exactly this text, prompt included.
            session_id, leaf: selects a sample of a session; `leaf` is its `metadata["leaf"]`, needed if there are
                several.
            start, stop: range of rows; by default all.

        Raises:
            NotFound: there is no such rollout, or its rows never arrived, did not fit or have been evicted.
            ErrorReply: the arguments do not select exactly one rollout, or it does not have these rows.
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
        """Return the positions that sparse attention chose for each token of one rollout, integers [stop - start,
        layers, top_k], padded with -1. Arguments and errors are the same as for `routed_experts`. For a router with
        `IndexerTopkMiddleware`."""
        return await self._rows(
            "indexer_topk", rid=rid, text=text, session_id=session_id, leaf=leaf, start=start, stop=stop
        )

    async def _rows(self, kind: str, **fields: object) -> ShapedRows:
        body = {"format": "safetensors", **{name: value for name, value in fields.items() if value is not None}}
        data = await self._transport.bytes(Request("POST", f"/{kind}", body, repeatable=True))
        with convert_errors(f"/{kind}"):
            arrays, _ = unpack(data)
            if kind not in arrays:
                raise Malformed(f"it has no {kind}")
            return arrays[kind]

    async def request(
        self, method: str, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None
    ) -> Any:
        """Send any other request to the router, and return the JSON of the reply. `path` is percent-encoded."""
        return await self._transport.json(Request(method, path, body, headers or {}))

    # Sessions

    async def create_session(
        self,
        session_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        contract: Mapping[str, Any] | None = None,
        evaluation: bool | Mapping[str, Any] | None = None,
    ) -> Session:
        """Create a session; the router makes an id unless one is given. `metadata` is stored with it; `contract` limits
        what its agent may do (docs/agents.md). With `evaluation`, one weight version samples the whole episode, and it
        is not for training.

        Raises:
            ErrorReply: the id is taken (409 `conflict`).
        """
        fields = {"session_id": session_id, "metadata": metadata, "contract": contract, "evaluation": evaluation}
        body = {name: value for name, value in fields.items() if value is not None}
        answer = await self._transport.json(Request("POST", "/sessions", body))
        if not isinstance(answer, dict) or not isinstance(answer.get("session_id"), str):
            raise InvalidReply("POST /sessions was answered without a session_id")
        transport, owner_url = self._transport, answer.get("owner_url")
        if isinstance(owner_url, str) and urlsplit(owner_url).hostname == urlsplit(self.base_url).hostname:
            transport = OwnerTransport(transport, owner_url)
        return Session(transport, self.base_url, answer["session_id"], self._api_key, own_key=answer.get("api_key"))

    def session(self, session_id: str) -> Session:
        """Return the handle of an existing session; no request is sent."""
        return Session(self._transport, self.base_url, session_id, self._api_key)

    async def sessions(self) -> list[SessionInfo]:
        """Return the sessions that the router holds, without evaluations."""
        return await self._transport.get_list("/sessions", "sessions")

    # Episodes: sessions and text rollouts

    async def episodes(self) -> list[EpisodeInfo]:
        """Return the sessions and text rollouts that can be audited."""
        return await self._transport.get_list("/episodes", "episodes")

    async def audit(self, episode_id: str, *, limit: int = 8) -> dict[str, Any]:
        """Return a comparison of an episode's recorded tokens with what the engines compute for them now.
        docs/check-your-tokens.md explains the fields.

        Args:
            limit: the number of samples to audit, the newest ones.

        Raises:
            NotFound: the router does not have the episode (any more).
        """
        return await read_audit(self._transport, f"/episodes/{quote(episode_id, safe='')}/audit", limit)


def _check_base_url(base_url: str) -> str:
    """Return the URL without a slash at its end.

    Raises:
        ValueError: it cannot be the URL of a router.
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
    """Return the request body of one generation.

    Raises:
        ValueError: the arguments ask for no generation, or for several.
    """
    if (text is None) == (input_ids is None):
        raise ValueError("text or input_ids is required, and not both")
    if (sampling_params or {}).get("n", 1) != 1:
        raise ValueError("n must be 1: several generations of one prompt are several calls at once, see rollouts.group")
    body = {"text": text, "input_ids": input_ids, "sampling_params": sampling_params, "rid": rid, **fields}
    return {name: value for name, value in body.items() if value is not None}


def _generate_request(body: Mapping[str, Any], routing_key: str | None) -> Request:
    return Request("POST", "/generate", body, {} if routing_key is None else {"X-SMG-Routing-Key": routing_key})


def _parse_event(event: bytes) -> Generation:
    """Parse one event of a stream.

    Raises:
        ErrorReply: the engine refused or failed; SGLang reports that with status 200, inside the stream.
    """
    data = event[len(DATA) :] if event.startswith(DATA) else event
    try:
        answer = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidReply(f"an event in the stream of /generate is not JSON: {error}") from None
    if isinstance(answer, dict) and "error" in answer:
        code = answer["error"].get("code") if isinstance(answer["error"], dict) else None
        raise read_error(code if isinstance(code, int) else 0, {}, data)
    return Generation.from_json(answer)
