"""What the fleet's engines can do: whether a chat stream tells the ids it sampled, and a logprob for each."""

from __future__ import annotations

import asyncio
import logging

import orjson

from miles_router import Router
from miles_router.errors import RouterError

logger = logging.getLogger(__name__)

OK = 200
FIELD = b"return_output_ids_in_sglext"
#: Without any of these SGLang's chat streams leave out the logprobs of tokens that show no text, a stop token's above
#: all.
PARSERS = ("tool_call_parser", "reasoning_parser")
MAX_SCHEMA = 64 * 1024 * 1024


class Engines:
    """Asked once, of any worker; an engine that turns out not to do what it says is believed then."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._stream_exactly: bool | None = None
        self._asking = asyncio.Lock()

    async def stream_exactly(self) -> bool:
        """Whether a chat stream tells all that recording needs."""
        if self._stream_exactly is None:
            async with self._asking:
                if self._stream_exactly is None:
                    await self._ask()
        return self._stream_exactly is not False

    def streams_are_inexact(self, reason: str) -> None:
        """From now on, streamed turns are generated whole and given as a stream afterwards."""
        if self._stream_exactly is not False:
            self._stream_exactly = False
            logger.warning("streams_are_buffered", extra={"fields": {"reason": reason}})

    async def _ask(self) -> None:
        try:
            shortfall = await self._shortfall()
        except RouterError as error:  # nobody to ask: the next stream will
            logger.warning("engine_is_unknown", extra={"fields": {"reason": str(error)}})
            return
        if shortfall is None:
            self._stream_exactly = True
        else:
            self.streams_are_inexact(shortfall)

    async def _shortfall(self) -> str | None:
        """By the engine's schema and settings. One that does not show them is taken for able: its first stream will
        tell."""
        schema = await self._get("/openapi.json")
        if schema is not None and FIELD not in schema:
            return f"the engine has no field {FIELD.decode()}"
        settings = _parsed(await self._get("/server_info"))
        if all(name in settings and not settings[name] for name in PARSERS):
            return f"the engine has neither of {', '.join(PARSERS)}: its streams leave out logprobs"
        return None

    async def _get(self, path: str) -> bytes | None:
        async with self._router.forward("GET", path) as forwarded:
            body = await forwarded.reply.read_all(MAX_SCHEMA)
        return body if forwarded.reply.status == OK else None


def _parsed(body: bytes | None) -> dict[str, object]:
    try:
        parsed = orjson.loads(body or b"{}")
    except orjson.JSONDecodeError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
