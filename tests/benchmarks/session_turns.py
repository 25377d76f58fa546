"""What a session's turn costs the router's process: CPU time by length of the history and API, sockets included.

    python -m tests.benchmarks.session_turns [--repeat 5] [--turns 50] [--markdown]

The conversations of `sessions.py`, which grow to some 32,000 tokens, asked of a router in a process of its own, with an
engine behind it that answers at once. Eight agents ask at the same time, turn by turn. CPU time is the router's alone,
user and system, of all its threads. Whatever is compared takes turns, so that drift of the machine hits all:

    chat, messages, responses   a turn of each API
    passed                      what a chat turn's bytes cost without a session: the request that its engine is given
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import random
import socket
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any

import orjson

from tests.benchmarks.peers import running_router
from tests.benchmarks.process import HOST
from tests.benchmarks.report import environment, number, table
from tests.benchmarks.sessions import APIS, SAMPLED_SHARE, TARGET_TOKENS, WORDS, Engine
from tests.support.tokenizers import tokenizer_directory

LAYER = "middleware_hub.openai_session_middleware.OpenAISessionMiddleware"
CHAT = "/v1/chat/completions"
PASSED = "passed"
AGENTS = 8
#: What a worker answers to anything but a turn.
STATUS = b'{"status": "ok", "model_path": "benchmark", "weight_version": "1", "is_generation": true, "data": []}'


class Worker(BaseHTTPRequestHandler):
    """An engine that answers at once, and keeps the last requests."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True
    engine: Engine
    asked: list[bytes] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self._give(STATUS)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path != CHAT:
            self._give(STATUS)
            return
        Worker.asked.append(body)
        self._give(self.engine.answer(orjson.loads(body)))

    def _give(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


class Subject:
    """A router, and a connection of each agent to it."""

    #: Seconds for what it does behind an answer.
    pause = 0.002

    def __init__(self, port: int, pid: int) -> None:
        self.pid = pid
        self._clock = ~pid << 3 | 2  # its CPU time (Linux, `clock_getcpuclockid`)
        self._sockets = [socket.create_connection((HOST, port)) for _ in range(AGENTS)]
        for each in self._sockets:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def round(self, requests: Sequence[tuple[str, bytes]]) -> tuple[list[bytes], float]:
        """What all agents are answered who ask at once, and the seconds of CPU that each took."""
        begun = time.clock_gettime(self._clock)
        for each, (path, body) in zip(self._sockets, requests, strict=True):
            self._ask(each, "POST", path, body)
        answers = [_answer(each) for each in self._sockets]
        time.sleep(self.pause)
        return answers, (time.clock_gettime(self._clock) - begun) / AGENTS

    def one(self, path: str, body: bytes, method: str = "POST") -> tuple[bytes, float]:
        """What one agent is answered, and the seconds of CPU that it took."""
        begun = time.clock_gettime(self._clock)
        self._ask(self._sockets[0], method, path, body)
        answer = _answer(self._sockets[0])
        time.sleep(self.pause)
        return answer, time.clock_gettime(self._clock) - begun

    @staticmethod
    def _ask(connection: socket.socket, method: str, path: str, body: bytes) -> None:
        head = f"{method} {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: "
        connection.sendall(b"%b%d\r\n\r\n%b" % (head.encode(), len(body), body))


def _answer(connection: socket.socket) -> bytes:
    reply = http.client.HTTPResponse(connection)
    reply.begin()
    body = reply.read()
    if reply.status not in (200, 201):
        raise RuntimeError(f"{reply.status} {body[:400]!r}")
    return body


@contextlib.contextmanager
def serving(engine: Engine) -> Iterator[int]:
    """A `Worker` with this engine; its port."""
    Worker.engine = engine
    server = ThreadingHTTPServer((HOST, 0), Worker)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()


@contextlib.contextmanager
def running(worker_port: int, log: Path, *arguments: str) -> Iterator[Subject]:
    """A router with sessions before it."""
    layers = ("--hf-checkpoint", tokenizer_directory("qwen3"), "--middleware-paths", LAYER)
    with running_router(worker_port, log, *layers, *arguments) as found:
        yield Subject(*found)


Times = dict[str, dict[int, list[float]]]


def episode(subject: Subject, name: str, api: str, turns: int, seed: int, times: Times, tokens: dict[int, int]) -> None:
    path, request, text_of = APIS[api]
    source = random.Random(seed)
    made, _ = subject.round([("/sessions", b"{}")] * AGENTS)
    sessions = [orjson.loads(answer)["session_id"] for answer in made]
    histories: list[list[dict[str, Any]]] = [[{"role": "system", "content": "You are an agent."}] for _ in sessions]
    given = int(TARGET_TOKENS / turns * (1 - SAMPLED_SHARE))
    asked: list[list[bytes]] = []
    for turn in range(turns):
        for messages in histories:
            messages.append({"role": "user", "content": " ".join(source.choice(WORDS) for _ in range(given))})
        Worker.asked.clear()
        answers, seconds = subject.round(
            [
                (f"/sessions/{session}{path}", orjson.dumps(request(messages)))
                for session, messages in zip(sessions, histories, strict=True)
            ]
        )
        times[name][turn].append(seconds)
        if name == "chat":
            asked.append(Worker.asked[:AGENTS])
            tokens[turn] = len(orjson.loads(asked[-1][0]).get("input_ids") or ()) + len(Worker.engine.triples)
        for messages, answer in zip(histories, answers, strict=True):
            messages.append({"role": "assistant", "content": text_of(orjson.loads(answer))})
    for turn, bodies in enumerate(asked):  # at the end: turns follow each other as they do for every other subject
        times[PASSED][turn].append(subject.round([(CHAT, body) for body in bodies])[1])


def measured(options: argparse.Namespace) -> tuple[Times, dict[int, int]]:
    """Seconds by what and turn, and the tokens of each turn's history."""
    engine = Engine(int(TARGET_TOKENS / options.turns * SAMPLED_SHARE), seed=1)
    times: Times = defaultdict(lambda: defaultdict(list))
    tokens: dict[int, int] = {}
    with tempfile.TemporaryDirectory(prefix="turns-") as folder, contextlib.ExitStack() as stack:
        now = stack.enter_context(running(stack.enter_context(serving(engine)), Path(folder) / "now.log"))
        subjects = [(now, api, api) for api in options.apis]
        for subject, _, api in subjects:  # what is loaded and cached first
            episode(subject, "", api, 5, 0, defaultdict(lambda: defaultdict(list)), {})
        for at in range(options.repeat):
            for subject, name, api in subjects[at % len(subjects) :] + subjects[: at % len(subjects)]:
                episode(subject, name, api, options.turns, at, times, tokens)
            print(f"\r{at + 1}/{options.repeat}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return times, tokens


def shown(times: Times, tokens: Mapping[int, int], *, markdown: bool) -> str:
    """Milliseconds by turn, and the ratios that are promised."""
    last = max(times["chat"])
    names = [name for name in (*APIS, PASSED) if name in times]
    places = sorted({0, 1, 2, *(round(last * part / 5) for part in range(1, 6))})

    def of(name: str, turn: int) -> float:
        return median(times[name][turn])

    rows = [
        [number(turn + 1, 0), number(tokens[turn], 0), *(number(of(name, turn) * 1e3, 2) for name in names)]
        for turn in places
    ]
    ratios = [["chat, last turn / second", number(of("chat", last) / of("chat", 1), 2)]]
    for name in names[1:]:
        share = [number(of(name, turn) / of("chat", turn), 2) for turn in (1, last)]
        ratios.append([f"{name} / chat, second turn and last", " ".join(share)])
    return f"{table(['turn', 'tokens', *names], rows, markdown)}\n\n{table(['ratio', ''], ratios, markdown)}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="episodes of each, with 8 agents (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=50, help="turns of each session (default: %(default)s)")
    parser.add_argument("--apis", nargs="+", choices=APIS, default=list(APIS), help="what agents speak; chat among it")
    parser.add_argument("--markdown", action="store_true", help="print the tables as GitHub markdown")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    for name, value in environment().items():
        print(f"{name}: {value}")
    times, tokens = measured(options)
    print(shown(times, tokens, markdown=options.markdown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
