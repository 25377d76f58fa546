"""The end of an answer, which waits until what it tells of is durable."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from miles_router.middlewares import Message, Send


class DurableEnd:
    """Gives a reply on as it comes, and its end once `settle` has returned. Of a reply that is no stream nothing is
    given before: what cannot be settled is refused.

    Args:
        last_event: what a stream ends with for its reader.
    """

    def __init__(
        self, send: Send, settle: Callable[[], Awaitable[None]], last_event: bytes | tuple[bytes, ...]
    ) -> None:
        self._send = send
        self._settle = settle
        self._last_event = last_event
        self._start: Message | None = None

    async def send(self, message: Message) -> None:
        """Raises as `settle`."""
        if message["type"] == "http.response.start":
            self._start = message
            if _is_stream(message):
                await self._begin()
            return
        if not message.get("more_body") or bytes(message["body"]).endswith(self._last_event):
            await self._settle()
        await self._begin()
        await self._send(message)

    async def _begin(self) -> None:
        if self._start is not None:
            start, self._start = self._start, None
            await self._send(start)


def _is_stream(start: Message) -> bool:
    return any(name.lower() == b"content-type" and b"event-stream" in value for name, value in start["headers"])
