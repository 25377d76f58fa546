"""Fan-out: one control request to every worker, one answer. The endpoints are a table; some rows have an effect here.

Every registered worker is asked concurrently, quarantined ones too. A worker that hangs is named after a bounded time.
A worker that was out of the fleet before and cannot be reached does not make the request fail: it takes no traffic, and
`same-weights` keeps it out until it has what it missed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import orjson

from miles_router.asgi.headers import RawHeaders, first
from miles_router.errors import BadRequest, NoWorkerAvailable, RouterError, UpstreamError, UpstreamTimeout
from miles_router.fleet.gate import Gate
from miles_router.fleet.inflight import InFlight
from miles_router.fleet.worker_url import WorkerUrl
from miles_router.fleet.workers import Worker, WorkerPool, WorkerState
from miles_router.forwarding.forwarder import Forwarder, Outgoing

logger = logging.getLogger(__name__)

PAUSE_MODES = ("abort", "retract", "in_place")
QUICK, SLOW = 60.0, 1800.0  # seconds a worker may take
BRIEF = 5.0  # and for what it does at once, if at all
MAX_ANSWER = 64 * 1024 * 1024
JSON = b"application/json"


@dataclass(frozen=True)
class Endpoint:
    """One row: a path that goes to every worker, the methods it takes, and how long a worker may take (seconds)."""

    path: str
    timeout: float = QUICK
    methods: tuple[str, ...] = ("POST",)


TABLE = (
    Endpoint("/pause_generation"),
    Endpoint("/continue_generation"),
    Endpoint("/abort_request"),
    Endpoint("/flush_cache", methods=("GET", "POST")),
    Endpoint("/release_memory_occupation", methods=("GET", "POST"), timeout=SLOW),
    Endpoint("/resume_memory_occupation", methods=("GET", "POST"), timeout=SLOW),
    Endpoint("/update_weights_from_disk", timeout=SLOW),
    Endpoint("/update_weight_version"),
    Endpoint("/begin_weight_update", timeout=SLOW),
    Endpoint("/end_weight_update", timeout=SLOW),
    Endpoint("/load_lora_adapter", timeout=SLOW),
    Endpoint("/unload_lora_adapter", timeout=SLOW),
    Endpoint("/start_profile", methods=("GET", "POST")),
    Endpoint("/stop_profile", methods=("GET", "POST"), timeout=SLOW),
    Endpoint("/slow_down", methods=("GET", "POST")),
    Endpoint("/configure_logging", methods=("GET", "POST")),
    Endpoint("/freeze_gc", methods=("GET", "POST")),
    Endpoint("/start_expert_distribution_record", methods=("GET", "POST")),
    Endpoint("/stop_expert_distribution_record", methods=("GET", "POST")),
    Endpoint("/dump_expert_distribution_record", methods=("GET", "POST"), timeout=SLOW),
)
#: What no generation can do without; released and resumed whole, or by the request's `tags`.
MEMORY = frozenset({"weights", "kv_cache"})
#: What brings the fleet to a standstill, and what ends that.
ENDS_STANDSTILL = frozenset({"/continue_generation", "/resume_memory_occupation"})
STANDSTILL = ENDS_STANDSTILL | {"/pause_generation", "/release_memory_occupation"}
#: Endpoints after which every worker is asked for its weight version anew.
WEIGHTS = frozenset({"/update_weights_from_disk", "/update_weight_version", "/end_weight_update"})


@dataclass(frozen=True)
class Outcome:
    """What one worker said, or why it said nothing (`status` 0)."""

    worker: Worker
    status: int
    headers: RawHeaders
    body: bytes
    reachable: bool = True

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    def shown(self) -> dict[str, object]:
        """For the `workers` part of an answer."""
        try:
            body: object = orjson.loads(self.body) if self.body else None
        except orjson.JSONDecodeError:
            body = self.body.decode("utf-8", "replace")
        return {"status": self.status, "body": body}


@dataclass(frozen=True)
class Answer:
    """The one answer to a fan-out."""

    status: int
    body: bytes
    content_type: bytes | None


class PartlyFailed(RouterError):
    """Some worker did not do what all were asked to."""

    status = 502
    type = "fan_out_failed"


class Control:
    """Asks all workers; keeps the gate and the pool in step with what they answered."""

    def __init__(
        self,
        *,
        pool: WorkerPool,
        forwarder: Forwarder,
        gate: Gate,
        in_flight: InFlight,
        extra: Iterable[str] = (),
        on_new_weights: Callable[[], None] = lambda: None,
    ) -> None:
        self.endpoints = {row.path: row for row in (*(Endpoint(path) for path in extra), *TABLE)}
        self.on_new_weights = on_new_weights
        self._pool = pool
        self._forwarder = forwarder
        self._gate = gate
        self._in_flight = in_flight
        self._one_at_a_time = asyncio.Lock()
        self._membership = asyncio.Lock()  # nobody joins while the fleet is being paused, woken and so on
        self._released: set[str] = set()  # the parts of its memory that the fleet is without
        self._to_sleep: list[Outgoing] = []  # what put it into this state, for whoever joins

    async def send(self, path: str, request: Outgoing, request_id: str) -> Answer:
        """One control request to every worker it concerns.

        Raises:
            BadRequest: input that no worker could make sense of; none was asked.
            NoWorkerAvailable: no worker is registered.
        """
        arguments = _arguments(path, request.body)
        if path == "/abort_request":
            return self._answer(await self._abort(request, arguments), request_id)
        async with self._one_at_a_time:
            if path not in STANDSTILL:
                return self._answer(await self._do(path, request, arguments), request_id)
            async with self._membership:
                return self._answer(await self._do(path, request, arguments), request_id)

    async def _do(self, path: str, request: Outgoing, arguments: Mapping[str, Any]) -> list[Outcome]:
        if path in ENDS_STANDSTILL and not len(self._pool):  # nobody is left who could refuse to go on
            self._took_effect(path, request, arguments, [])
        workers = self._workers()
        if path == "/pause_generation":
            return await self._pause(request, str(arguments.get("mode", "abort")))
        if path == "/release_memory_occupation":
            self._gate.sleep()
        with self._changing_weights(path):
            outcomes = await self._ask(self.endpoints[path], request, workers)
        self._took_effect(path, request, arguments, outcomes)
        return outcomes

    def _workers(self) -> list[Worker]:
        if not len(self._pool):
            raise NoWorkerAvailable("no worker is registered; workers register with POST /add_worker")
        return list(self._pool)

    @contextmanager
    def _changing_weights(self, path: str) -> Iterator[None]:
        """What probes hear of weight versions meanwhile is neither the old fleet nor the new one."""
        self._pool.weights_epoch += path in WEIGHTS
        try:
            yield
        finally:
            self._pool.weights_epoch += path in WEIGHTS

    async def _pause(self, request: Outgoing, mode: str) -> list[Outcome]:
        """All pause or none: where some worker refuses, those that did pause go on again."""
        endpoint, before = self.endpoints["/pause_generation"], self._gate.mode
        kept = [worker for worker in self._pool if before == "in_place" or worker.state is WorkerState.PAUSED]
        self._gate.pause(mode)
        if mode == "abort" and kept:
            # SGLang 0.5.23 waits, deaf to continue, for the end of what it keeps in place, which comes with continue.
            # What was retracted it aborts at once.
            await self._ask(_brief(endpoint), _order("/pause_generation", mode="retract"), kept)
        outcomes = await self._ask(endpoint, request, list(self._pool))
        if _failed(outcomes):
            if before is None:
                await self._take_back(outcomes)
            else:
                self._gate.mode = before
        return outcomes

    async def _take_back(self, outcomes: Sequence[Outcome]) -> None:
        """Whoever paused goes on again, and so does whoever was silent, for it may have heard. Who then does not answer
        takes no traffic until it says that it is ready."""
        endpoint, order = self.endpoints["/continue_generation"], _order("/continue_generation")
        may_be_paused = [outcome for outcome in outcomes if outcome.ok or not outcome.reachable]
        asking = (
            self._ask_one(endpoint if each.ok else _brief(endpoint), order, each.worker) for each in may_be_paused
        )
        for outcome in await asyncio.gather(*asking):
            if not outcome.ok:
                self._pool.set_paused(outcome.worker, "may be paused, and could not be continued")
        self._gate.resume()

    def _took_effect(
        self, path: str, request: Outgoing, arguments: Mapping[str, Any], outcomes: Sequence[Outcome]
    ) -> None:
        if path == "/continue_generation":
            self._went_on(outcomes)
        elif path == "/resume_memory_occupation":
            if not _failed(outcomes):
                self._released -= _tags(arguments) or self._released
                self._to_sleep.append(request)
            self._stay_asleep_or_wake()
        elif path == "/release_memory_occupation":
            if any(outcome.ok for outcome in outcomes):
                self._released |= _tags(arguments) or MEMORY
                self._to_sleep.append(request)
            self._stay_asleep_or_wake()
        elif path in WEIGHTS:
            version = arguments.get("new_version", arguments.get("weight_version"))
            if version is not None:
                self._pool.updated([outcome.worker for outcome in outcomes if outcome.ok], str(version))
            self.on_new_weights()

    def _went_on(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.ok:
                self._pool.set_unpaused(outcome.worker)
        for outcome in _failed(outcomes):
            self._pool.set_paused(outcome.worker, "could not be continued")
        self._gate.resume()

    def _stay_asleep_or_wake(self) -> None:
        """Trainers wake a fleet in steps: its weights, an update, then the rest. It sleeps until the last."""
        if not self._released:
            self._to_sleep.clear()
            self._gate.wake()

    async def _abort(self, request: Outgoing, arguments: Mapping[str, Any]) -> list[Outcome]:
        """`rid`: only where it runs; one the router cannot place is asked of everybody, which harms nobody."""
        rid = None if arguments.get("abort_all") else arguments.get("rid")
        concerned = self._in_flight.abort(rid)
        for exchange in concerned:
            self._gate.release(exchange.flight)
        urls = {exchange.flight.worker_url for exchange in concerned} if rid else set()
        workers = [worker for worker in self._pool if worker.url in urls] or self._workers()
        return await self._ask(self.endpoints["/abort_request"], request, workers)

    @asynccontextmanager
    async def admitting(self, address: WorkerUrl, api_key: str | None) -> AsyncIterator[None]:
        """Within this a worker is registered: it is paused or asleep if the fleet is, and the fleet stays as it is.

        Raises:
            PartlyFailed: it could not be brought into that state.
        """
        async with self._membership:
            await self.pause_newcomer(address, api_key)
            await self._put_newcomer_to_sleep(address, api_key)
            yield

    async def pause_newcomer(self, address: WorkerUrl, api_key: str | None) -> None:
        """A worker that registers while the fleet is paused is paused before anything else reaches it.

        Raises:
            PartlyFailed: it could not be.
        """
        if self._gate.paused_since is not None:
            order = _order("/pause_generation", mode=self._gate.mode)
            await self._order_newcomer(order, address, api_key, "the fleet is paused")

    async def _put_newcomer_to_sleep(self, address: WorkerUrl, api_key: str | None) -> None:
        """It gives up what the fleet has given up: a waking SGLang 0.5.23 dies of memory that it never released. One
        that is registered already sleeps."""
        if address.url not in {worker.url for worker in self._pool}:
            for request in self._to_sleep:
                order = Outgoing(request.method, request.target, [(b"content-type", JSON)], request.body)
                await self._order_newcomer(order, address, api_key, "the fleet is asleep")

    async def _order_newcomer(self, order: Outgoing, address: WorkerUrl, api_key: str | None, why: str) -> None:
        newcomer = Worker(address, api_key=api_key, attributes={}, now=0.0)
        outcome = await self._ask_one(Endpoint(order.target.decode()), order, newcomer)
        if not outcome.ok:
            said = outcome.body.decode(errors="replace")
            raise PartlyFailed(f"{why}, and {address.url} could not be: {said}")

    async def _ask(self, endpoint: Endpoint, request: Outgoing, workers: Sequence[Worker]) -> list[Outcome]:
        return list(await asyncio.gather(*(self._ask_one(endpoint, request, worker) for worker in workers)))

    async def _ask_one(self, endpoint: Endpoint, request: Outgoing, worker: Worker) -> Outcome:
        try:
            return await asyncio.wait_for(self._exchange(request, worker), endpoint.timeout)
        except asyncio.TimeoutError:
            error: UpstreamError = UpstreamTimeout(f"no answer within {endpoint.timeout:g} s")
        except UpstreamError as caught:
            error = caught
        logger.warning("control_failed", extra={"fields": {"worker": worker.url, "reason": str(error)}})
        return Outcome(worker, 0, [], str(error).encode(), reachable=False)

    async def _exchange(self, request: Outgoing, worker: Worker) -> Outcome:
        reply = await self._forwarder.send_to(worker, request, slot=False)
        try:
            return Outcome(worker, reply.status, reply.headers, await reply.read_all(MAX_ANSWER))
        finally:
            reply.close()

    def _answer(self, outcomes: Sequence[Outcome], request_id: str) -> Answer:
        """The workers' own answer where they agree, else one that names each."""
        answered = [outcome for outcome in outcomes if not _excused(outcome)]
        same = len({(outcome.status, outcome.body) for outcome in answered}) == 1
        if same and answered[0].status and answered[0].status < 500 and len(answered) == len(outcomes):
            return Answer(answered[0].status, answered[0].body, first(answered[0].headers, b"content-type"))
        shown = {outcome.worker.url: outcome.shown() for outcome in outcomes}
        if _failed(outcomes):
            names = ", ".join(outcome.worker.url for outcome in _failed(outcomes))
            error = PartlyFailed(f"not every worker did it: {names}")
            return Answer(error.status, orjson.dumps({**error.body(request_id), "workers": shown}), JSON)
        return Answer(200, orjson.dumps({**_agreed(answered), "workers": shown}), JSON)


def _brief(endpoint: Endpoint) -> Endpoint:
    return replace(endpoint, timeout=min(endpoint.timeout, BRIEF))


def _order(path: str, **fields: object) -> Outgoing:
    """A control request of the router's own."""
    return Outgoing("POST", path.encode(), [(b"content-type", JSON)], orjson.dumps(fields))


def _excused(outcome: Outcome) -> bool:
    """A worker that takes no traffic anyway and cannot be reached."""
    return not outcome.reachable and outcome.worker.state is WorkerState.QUARANTINED


def _failed(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Whose failure makes the request fail; everybody's, where nobody did it."""
    if not any(outcome.ok for outcome in outcomes):
        return list(outcomes)
    return [outcome for outcome in outcomes if not outcome.ok and not _excused(outcome)]


def _tags(arguments: Mapping[str, Any]) -> frozenset[str]:
    """The parts of the memory that are meant; none: all."""
    tags = arguments.get("tags")
    return frozenset(map(str, tags)) if isinstance(tags, list) else frozenset()


def _agreed(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """The fields in which JSON answers agree, so that a client of a single worker finds what it looks for."""
    bodies = [outcome.shown()["body"] for outcome in outcomes]
    if not bodies or not all(isinstance(body, dict) for body in bodies):
        return {}
    dicts: list[dict[str, object]] = [body for body in bodies if isinstance(body, dict)]
    return {name: value for name, value in dicts[0].items() if all(name in d and d[name] == value for d in dicts)}


def _arguments(path: str, body: bytes) -> Mapping[str, Any]:
    """The JSON object in the body, checked as far as every worker would check it.

    Raises:
        BadRequest: it is none, or a value that no worker takes.
    """
    if not body.strip():
        arguments: Any = {}
    else:
        try:
            arguments = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise BadRequest(f"the request body is not valid JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise BadRequest("the request body must be a JSON object")
    if path == "/pause_generation" and arguments.get("mode", "abort") not in PAUSE_MODES:
        raise BadRequest(f"mode must be one of {', '.join(PAUSE_MODES)}, got {arguments['mode']!r}")
    if path == "/update_weight_version" and not isinstance(arguments.get("new_version"), str):
        raise BadRequest("new_version must be a string")
    if path == "/update_weights_from_disk" and not isinstance(arguments.get("model_path"), str):
        raise BadRequest("model_path must be a string")
    if path == "/abort_request" and not (arguments.get("abort_all") or isinstance(arguments.get("rid"), str)):
        raise BadRequest("rid (a string) or abort_all is required")
    return arguments
