"""What routed experts cost without care: `--middleware-paths tests.benchmarks.reencode.ReEncode`.

The JSON is parsed, the ids decoded, kept as they came, encoded and written again: what a middleware that works on
parsed answers does to each of them.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class ReEncode:
    """Keeps the last answers' ids as int32."""

    def __init__(self, app: ASGIApp, *, router: Any, answers: int = 16) -> None:
        self.app = app
        self._held: list[npt.NDArray[np.int32]] = []
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts: list[bytes] = []
        starts: list[Message] = []

        async def collect(message: Message) -> None:
            if message["type"] == "http.response.start":
                starts.append(message)
                return
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                body = self._again(b"".join(parts))
                headers = [pair for pair in starts[0]["headers"] if pair[0] != b"content-length"]
                headers.append((b"content-length", str(len(body)).encode()))
                await send({**starts[0], "headers": headers})
                await send({"type": "http.response.body", "body": body})

        await self.app(scope, receive, collect if scope["path"] == "/generate" else send)

    def _again(self, body: bytes) -> bytes:
        answer = orjson.loads(body)
        ids = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), dtype=np.int32)
        self._held = [*self._held[1 - self._answers :], ids]
        answer["meta_info"]["routed_experts"] = base64.b64encode(ids.tobytes()).decode()
        return orjson.dumps(answer)
