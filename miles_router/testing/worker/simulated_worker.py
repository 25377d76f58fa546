"""A simulated SGLang worker without a model. It serves SGLang's protocol on a real port with seeded output; tests can
inspect its requests and plan faults."""

import asyncio
import contextlib
import gzip
import logging
import random
import socket
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, ClassVar, TypeVar
from urllib.parse import parse_qsl, unquote

try:
    import aiohttp
    from aiohttp import web
except ModuleNotFoundError as error:
    raise ImportError("the simulated worker needs aiohttp: pip install 'miles-router[testing]'") from error

from miles_router.testing.worker.engine import Engine
from miles_router.testing.worker.exchange_log import Exchange, ExchangeLog
from miles_router.testing.worker.faults import Faults
from miles_router.testing.worker.model.constrained import stop_id
from miles_router.testing.worker.model.generation import Model
from miles_router.testing.worker.model.indexer import IndexerShape
from miles_router.testing.worker.model.moe import MoeShape
from miles_router.testing.worker.model.script import Script
from miles_router.testing.worker.model.vocabulary import Tokenizer, ToyTokenizer
from miles_router.testing.worker.reply import Reply, forever, reset
from miles_router.testing.worker.routes.chat import chat_completions
from miles_router.testing.worker.routes.completions import completions
from miles_router.testing.worker.routes.control import CONTROL_ROUTES, Route
from miles_router.testing.worker.routes.info import INFO_ROUTES, detokenize, model, server_info, tokenize
from miles_router.testing.worker.routes.messages import messages
from miles_router.testing.worker.routes.native import generate
from miles_router.testing.worker.routes.parsing import PARSING_ROUTES
from miles_router.testing.worker.routes.responses import responses
from miles_router.testing.worker.routes.schema import openapi
from miles_router.testing.worker.settings import Settings
from miles_router.testing.worker.visit import InternalError, Refusal, Visit
from miles_router.testing.worker.wire.generate_input import LethalPrompt

logger = logging.getLogger("miles_router.testing.worker")

Worker = TypeVar("Worker", bound="SimulatedWorker")
Routes = Mapping[tuple[str, str], Route]
SGLANG_ROUTES: dict[tuple[str, str], Route] = {
    **CONTROL_ROUTES,
    **INFO_ROUTES,
    **PARSING_ROUTES,
    ("POST", "/generate"): generate,
    ("PUT", "/generate"): generate,
    ("POST", "/v1/chat/completions"): chat_completions,
    ("POST", "/v1/completions"): completions,
    ("POST", "/v1/messages"): messages,
    ("POST", "/v1/responses"): responses,
}
SGLANG_ROUTES["GET", "/openapi.json"] = openapi(SGLANG_ROUTES)
# Aliases that SGLang leaves out of its OpenAPI schema.
SGLANG_ROUTES.update({("POST", "/tokenize"): tokenize, ("POST", "/detokenize"): detokenize})
_OPEN_WITHOUT_KEY = ("/health", "/ready", "/metrics")
_MAX_BODY_BYTES = 1 << 40
_REGISTRATION_RETRY_S = 0.2


class SimulatedWorker:
    """A simulated worker; `async with SimulatedWorker() as worker:` serves at `worker.url` until the block ends.

    Args:
        seed: stands for the model's weights: workers with the same seed and vocabulary sample the same tokens.
        replica: varies only the samples of requests without a `rid`.
        tokenizer: a directory with `tokenizer.json`, a `Tokenizer`, or None for the toy vocabulary.
        script: the answers to agents, step by step: a `Script` or its steps.
        router_url: the router with which the worker registers itself, retrying until it answers.
        auto_truncate: truncate prompts that are longer than `context_len`.
        dp_size: data-parallel ranks, each with its own prefix cache.

    A subclass imitates another engine by its class attributes, `make_engine`, `registration` and `crash`.
    """

    #: The handlers, by method and path.
    routes: ClassVar[Routes] = SGLANG_ROUTES
    #: Routes that SGLang's HTTP process forwards to the scheduler, besides generations.
    scheduler_routes: ClassVar[frozenset[Route]] = frozenset({*CONTROL_ROUTES.values(), server_info})
    visit_type: ClassVar[type[Visit]] = Visit
    reply_type: ClassVar[type[Reply]] = Reply

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        seed: int = 0,
        replica: int = 0,
        tokenizer: str | Tokenizer | None = None,
        token_latency_s: float = 0.0,
        weight_version: str = "default",
        model_path: str = "simulated-model",
        served_model_name: str | None = None,
        moe: MoeShape | None = None,
        indexer: IndexerShape | None = None,
        script: Script | Iterable[object] | None = None,
        router_url: str | None = None,
        incremental_streaming_output: bool = False,
        api_key: str | None = None,
        context_len: int = 32768,
        auto_truncate: bool = False,
        stop_probability: float = 1 / 256,
        tool_call_parser: str | None = "qwen25",
        reasoning_parser: str | None = None,
        enable_lora: bool = False,
        health_latency_s: float = 0.0,
        health_timeout_s: float = 20.0,
        log_limit: int = 10_000,
        dp_size: int = 1,
    ) -> None:
        self.host = host
        self.port = port
        self.seed = seed
        self.router_url = router_url
        vocabulary = load_tokenizer(tokenizer)
        self.tokenizer = vocabulary
        weights = Model.seeded(vocabulary, seed, stop_probability, context_len, auto_truncate)
        self.engine = self.make_engine(
            weights,
            weight_version=weight_version,
            token_latency_s=token_latency_s,
            replica=replica,
            enable_lora=enable_lora,
            dp_size=dp_size,
        )
        self.log = ExchangeLog(log_limit)
        self.faults = Faults()
        self.settings = Settings(
            model_path=model_path,
            served_model_name=served_model_name or model_path,
            tokenizer_path=tokenizer if isinstance(tokenizer, str) else model_path,
            moe=moe,
            indexer=indexer,
            script=script if script is None or isinstance(script, Script) else Script(script),
            incremental_streaming_output=incremental_streaming_output,
            api_key=api_key,
            context_len=context_len,
            auto_truncate=auto_truncate,
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
            health_latency_s=health_latency_s,
            health_timeout_s=health_timeout_s,
            started_at=int(time.time()),
            startup_s=random.random(),
        )
        self._server: web.Server | None = None
        self._listener: asyncio.Server | None = None
        self._reserved: socket.socket | None = None
        self._registration: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """The worker's URL, `http://host:port`. With port 0 it is valid only after the start."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def make_engine(self, model: Model, **options: Any) -> Engine:
        """Return the engine with these options of `Engine`."""
        return Engine(model, **options)

    @property
    def registration(self) -> dict[str, str]:
        """The parameters with which the worker registers itself with a router."""
        return {"url": self.url}

    @property
    def weight_version(self) -> str:
        return self.engine.weight_version

    @property
    def running(self) -> int:
        """The number of running generations."""
        return len(self.engine.running)

    def stop_scheduler(self) -> None:
        """Hang like an engine whose scheduler process is stopped. Connections stay open and `/model_info` is answered,
        but generations, `/health`, `/server_info` and control requests get no reply."""
        self.engine.stop()

    def continue_scheduler(self) -> None:
        """Undo `stop_scheduler()`; waiting requests continue."""
        self.engine.go_on()

    def say(self, answer: str | list[int]) -> None:
        """Plan the output of the next generation. Several calls plan several generations in order.

        A text is tokenized; ids are used exactly as given. A stop token is appended unless the last token is one.
        """
        ids = self.tokenizer.encode(answer) if isinstance(answer, str) else list(answer)
        ended = bool(ids) and ids[-1] in self.tokenizer.eos_token_ids
        self.engine.scripts.append(ids if ended else [*ids, stop_id(self.tokenizer)])

    async def __aenter__(self: Worker) -> Worker:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen, and register with the router in the background if `router_url` is set.

        Raises:
            OSError: the port is in use.
        """
        self._server = web.Server(
            self._answer, request_factory=self._make_request, handler_cancellation=True, auto_decompress=False
        )
        await self.restart()
        if self.router_url is not None:
            loop = asyncio.get_running_loop()
            self._registration = loop.create_task(self._register(self.router_url), name=f"register {self.url}")

    async def stop(self) -> None:
        """Stop listening, and close all connections and tasks. Further calls do nothing."""
        if self._registration is not None:
            self._registration.cancel()
            await asyncio.wait([self._registration])
            self._registration = None
        await self.refuse()
        if self._server is not None:
            await self._abort_connections()
            await self._server.shutdown(timeout=1.0)
            self._server = None
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None

    async def kill(self) -> None:
        """Simulate a crash: every connection is reset and new ones are refused."""
        await self.refuse()
        await self._abort_connections()

    async def refuse(self) -> None:
        """Refuse new connections and close idle ones. Running requests continue."""
        if self._listener is None:
            return
        self._listener.close()
        self._listener = None
        # A bound socket that does not listen: connections are refused, and no other process can take the port.
        self._reserved = self._bind()
        assert self._server is not None
        self._server.pre_shutdown()
        await asyncio.sleep(0)

    async def restart(self) -> None:
        """Listen again on the same port after `kill()` or `refuse()`. The engine keeps its state."""
        if self._listener is not None:
            return
        assert self._server is not None, "start() the worker first"
        sock, self._reserved = self._reserved or self._bind(), None
        self.port = sock.getsockname()[1]
        self._listener = await asyncio.get_running_loop().create_server(self._server, sock=sock, backlog=1024)

    def _bind(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((self.host, self.port))
        except OSError:
            sock.close()
            raise
        return sock

    async def _abort_connections(self) -> None:
        assert self._server is not None
        for connection in self._server.connections:
            reset(connection.transport)
        # The server removes a connection from its list once its handler is cancelled.
        for _ in range(100):
            if not self._server.connections:
                return
            await asyncio.sleep(0)

    async def _register(self, router_url: str) -> None:
        target = f"{router_url.rstrip('/')}/add_worker"
        async with aiohttp.ClientSession() as session:
            while True:
                try:
                    async with session.post(target, params=self.registration) as response:
                        if response.status == 200:
                            logger.info("registered %s with %s", self.url, router_url)
                            return
                        logger.warning("%s answered %d to the registration", router_url, response.status)
                except aiohttp.ClientError as error:
                    logger.info("the router at %s does not answer yet: %s", router_url, error)
                await asyncio.sleep(_REGISTRATION_RETRY_S)

    @staticmethod
    def _make_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        loop = asyncio.get_running_loop()
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=_MAX_BODY_BYTES)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        exchange = Exchange(request.method, request.raw_path, request.raw_headers)
        self.log.open(exchange)
        reply = self.reply_type(request, exchange, self.faults.take(exchange.path))
        try:
            exchange.body = await request.read()
            if reply.replaced:
                return await reply.misbehave()
            return await self._route(request, exchange, reply)
        except asyncio.CancelledError:
            exchange.disconnected = not reply.cut
            raise
        except ConnectionResetError:  # the client has left, and the server is about to cancel this handler
            exchange.disconnected = not reply.cut
            await forever()
        finally:
            exchange.done = True
            self.log.notify()

    async def _route(self, request: web.BaseRequest, exchange: Exchange, reply: Reply) -> web.StreamResponse:
        path = unquote(exchange.path)
        if not self._authorized(request, path):
            return await reply.json({"error": "Unauthorized"}, 401)
        route = _find_route(self.routes, request.method, path)
        if route is None:
            return await _no_route(self.routes, reply, path, exchange.target)
        visit = self.visit_type(
            body=_decoded(request, exchange.body),
            query=dict(parse_qsl(exchange.target.partition("?")[2])),
            content_type=request.headers.get("content-type", ""),
            path_tail=path.removeprefix("/v1/models/"),
            reply=reply,
            exchange=exchange,
            engine=self.engine,
            settings=self.settings,
        )
        try:
            if route in self.scheduler_routes:
                await self.engine.turn()
            return await route(visit)
        except Refusal as refusal:
            return await reply.json(refusal.content, refusal.status)
        except InternalError as error:
            logger.error("500 on %s: %s", exchange.target, error)
            return await reply.text("Internal Server Error", 500)
        except LethalPrompt as error:
            return await self.crash(reply, error)

    async def crash(self, reply: Reply, error: LethalPrompt) -> web.StreamResponse:
        """Answer 400 to a prompt that crashes a real worker."""
        logger.error("a real worker would crash: %s", error)
        return await reply.json({"error": {"message": f"{error}; a real worker would crash"}}, 400)

    def _authorized(self, request: web.BaseRequest, path: str) -> bool:
        key = self.settings.api_key
        if key is None or path.startswith(_OPEN_WITHOUT_KEY):
            return True
        return request.headers.get("authorization") == f"Bearer {key}"


def load_tokenizer(given: str | Tokenizer | None) -> Tokenizer:
    """Return the toy vocabulary for None, the tokenizer in a directory for a string, else `given` itself."""
    if given is None:
        return ToyTokenizer()
    if not isinstance(given, str):
        return given
    from miles_router.testing.worker.model.hf_vocabulary import DirectoryTokenizer

    return DirectoryTokenizer(given)


def _find_route(routes: Routes, method: str, path: str) -> Route | None:
    route = routes.get((method, path))
    if route is None and method == "GET" and path.startswith("/v1/models/"):
        return model
    return route


async def _no_route(routes: Routes, reply: Reply, path: str, target: str) -> web.StreamResponse:
    """Answer as FastAPI does if no route matches: 405 for another method, 307 for a trailing slash, else 404."""
    if allowed := [method for method, known in routes if known == path]:
        return await reply.json({"detail": "Method Not Allowed"}, 405, {"allow": ", ".join(allowed)})
    if path.endswith("/") and any(known == path.rstrip("/") for _, known in routes):
        where, question, query = target.partition("?")
        return await reply.empty(307, {"location": where.rstrip("/") + question + query})
    return await reply.json({"detail": "Not Found"}, 404)


def _decoded(request: web.BaseRequest, body: bytes) -> bytes:
    if request.headers.get("content-encoding") == "gzip":
        with contextlib.suppress(gzip.BadGzipFile):
            return gzip.decompress(body)
    return body
