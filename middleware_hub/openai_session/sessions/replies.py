"""Recorded replies, which are sent again when an agent repeats a request."""

from __future__ import annotations

from dataclasses import dataclass

from miles_router.middlewares import Send

#: Equal for a request and its repetitions: the agent's turn id, the path, and a digest of the body.
RepeatKey = tuple[str, str, bytes]


@dataclass(frozen=True)
class RecordedReply:
    """A complete reply, as the agent received it."""

    headers: list[tuple[bytes, bytes]]
    body: bytes

    async def send_to(self, send: Send) -> None:
        """Send the reply with status 200."""
        await send({"type": "http.response.start", "status": 200, "headers": list(self.headers)})
        await send({"type": "http.response.body", "body": self.body})
