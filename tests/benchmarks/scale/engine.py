"""An engine that answers a turn, or ids, at once with N tokens: `python -m tests.benchmarks.scale.engine PORT N`.

A protocol without a framework, so that it takes little of the machine.
"""

from __future__ import annotations

import asyncio
import sys

import orjson

from tests.benchmarks.backend import STATUS
from tests.benchmarks.process import HOST
from tests.benchmarks.sessions import Engine
from tests.support.session_trial import qwen3

LENGTH = b"content-length:"


def written(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def generation(sampled: int) -> bytes:
    """A generation as SGLang answers it, with `%d` for the number of prompt tokens."""
    text = " item" * sampled
    ids = [*qwen3().encode(text)]
    logprobs = [[-0.5, each, None] for each in ids]
    meta: dict[str, object] = {"id": "0", "prompt_tokens": "%d", "completion_tokens": len(ids), "weight_version": "1"}
    meta |= {"finish_reason": {"type": "length", "length": len(ids)}, "output_token_logprobs": logprobs}
    return orjson.dumps({"text": text, "output_ids": ids, "meta_info": meta}).replace(b'"%d"', b"%d")


class Connection(asyncio.Protocol):
    """One, with one request after the other."""

    def __init__(self, sampled: int) -> None:
        engine = Engine(sampled, seed=1)
        self._first = written(engine.answer({"return_prompt_token_ids": True}))
        self._next = written(engine.answer({}))
        self._generation = generation(sampled)
        self._read = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._read += data
        while (end := self._read.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._read[:end]).lower()
            at = head.find(LENGTH)
            length = int(head[at + len(LENGTH) :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._read) < end + 4 + length:
                return
            body = self._read[end + 4 : end + 4 + length]
            if head.startswith(b"post /generate"):
                reply = written(self._generation % len(orjson.loads(body)["input_ids"]))
            elif not head.startswith(b"post /v1/"):
                reply = written(STATUS.encode())
            else:
                reply = self._first if b'"return_prompt_token_ids"' in body else self._next
            del self._read[: end + 4 + length]
            self._transport.write(reply)


async def main() -> None:
    port, sampled = map(int, sys.argv[1:])
    server = await asyncio.get_running_loop().create_server(lambda: Connection(sampled), HOST, port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
