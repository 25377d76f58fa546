"""Replies as agents were given them, by what a request and its repetitions have in common."""

from __future__ import annotations

from dataclasses import dataclass

from miles_router.middlewares import Send

#: The agent's name for a turn, the path, and a digest of the body.
RepeatKey = tuple[str, str, bytes]


@dataclass(frozen=True)
class RecordedReply:
    """A reply as the agent was given it."""

    headers: list[tuple[bytes, bytes]]
    body: bytes

    async def give_to(self, send: Send) -> None:
        """Give it again."""
        await send({"type": "http.response.start", "status": 200, "headers": list(self.headers)})
        await send({"type": "http.response.body", "body": self.body})
