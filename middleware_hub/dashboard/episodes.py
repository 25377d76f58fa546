"""The routes `/router/episodes` and `/router/run`, which the dashboard reads.

Each middleware that holds episodes returns pages of its own, newest first; this module merges them into one list. With
`dashboard_text` off, the answers contain no texts, token ids or bytes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from middleware_hub.dashboard.gathering import one_page, one_run
from middleware_hub.dashboard.hidden_texts import HiddenTexts, named_reason
from middleware_hub.dashboard.tokens import BINARY, MOST_TOKENS, Slice, Vocabulary, written_slice
from middleware_hub.view.tree import BranchTree
from miles_router.errors import BadRequest, NotFound
from miles_router.middlewares import Exchange, Pace, Router, Watch
from miles_router.middlewares.episodes import (
    OTHER_REASON,
    STATES,
    EpisodePlace,
    EpisodeRow,
    EpisodeView,
    Facets,
    ListedEpisode,
    TurnRow,
    parse_worker_url,
)
from miles_router.trajectory.json_parts import list_parts

JSON = "application/json"
#: Episodes per page, by default and at most; turns per answer at most; episodes fetched from a middleware at a time.
USUAL, MOST, MOST_TURNS, BATCH = 50, 500, 2000, 64
PARAMETERS = ("limit", "after", "state", "kind", "group", "reason", "worker")
#: Separates the two parts of a cursor.
BETWEEN = "~"


@dataclass(frozen=True)
class Wanted:
    """A request's page and filters; a filter of None matches every episode."""

    limit: int
    after: EpisodePlace | None
    state: str | None = None
    kind: str | None = None
    group: str | None = None
    reason: str | None = None
    worker: str | None = None

    def takes(self, facets: Facets, named: Collection[str]) -> bool:
        """Return True if an episode passes the filters. Reasons that are not in `named` count as `OTHER_REASON`."""
        return (
            self.state in (None, facets.state)
            and self.group in (None, facets.group)
            and (self.reason is None or self.reason in {named_reason(each, named) for each in facets.reasons})
            and (self.worker is None or self.worker in facets.workers)
        )

    @property
    def filters(self) -> bool:
        """True if the request has filters that need an episode's facets; `kind` is not one of them."""
        return any(each is not None for each in (self.state, self.group, self.reason, self.worker))


class Found(NamedTuple):
    """An episode, and its kind: the name under which its middleware registered it."""

    kind: str
    view: EpisodeView


class EpisodeRoutes:
    """The handlers of the episode routes for one model. The default model's handlers receive all requests, and pass a
    request for another model to that model's handlers."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._text = router.config.dashboard_text == "on"
        self._vocabulary = Vocabulary(self._router) if self._text else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="episodes")
        self._others: dict[str, EpisodeRoutes] = {}

    def routes(self) -> list[BaseRoute]:
        """Return all routes; they need the administration key. The process that receives a request answers it."""
        return [
            Route("/router/episodes", self._of_model(EpisodeRoutes.list), methods=["GET"]),
            Route("/router/episodes/{id}", self._of_model(EpisodeRoutes.detail, anywhere=True), methods=["GET"]),
            Route("/router/episodes/{id}/tokens", self._of_model(EpisodeRoutes.tokens, anywhere=True), methods=["GET"]),
            Route("/router/run", self._of_model(EpisodeRoutes.run), methods=["GET"]),
        ]

    def _of_model(
        self, answer: Callable[[EpisodeRoutes, Request], Awaitable[Response]], *, anywhere: bool = False
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return a handler that calls `answer` with the handlers of the model in the path.

        Args:
            anywhere: if this process does not have the episode, ask the other processes.
        """

        async def answered(request: Request) -> Response:
            model = Exchange.of(request.scope).pool
            if model is not None and model not in self._others:
                self._others[model] = EpisodeRoutes(self._router.of_model(model))
            handler = partial(answer, self if model is None else self._others[model])
            return await (self._in_any_process(handler) if anywhere else handler)(request)

        return answered

    async def run(self, request: Request) -> Response:
        _known(request, ())
        gate = self._router.gate
        shown = {"closed": gate.closed, "held": gate.held}
        run = self._router.run.describe()
        own = {**(run if self._text else self._hidden.run(run)), "gate": shown, "pauses": _pauses(self._router)}
        return _json(one_run([own, *await self._router.owners.answers(request.scope)]))

    # The list

    async def list(self, request: Request) -> Response:
        wanted = self._wanted(request)
        rows: list[dict[str, Any]] = []
        last: EpisodePlace | None = None
        more, pace = False, Pace()
        with Watch(request.receive):
            async for kind, view in self._newest(wanted):
                if len(rows) == wanted.limit:
                    more = True
                    break
                last = view.place
                rows.append(self._row(kind, view))
                await pace.step()
            own = {"episodes": rows, "next": _cursor(*last) if more and last is not None else None, "text": self._text}
            pages = [own, *await self._router.owners.answers(request.scope)]
        return _json(own if len(pages) == 1 else one_page(pages, wanted.limit, _cursor))

    async def _newest(self, wanted: Wanted) -> AsyncIterator[tuple[str, ListedEpisode]]:
        """Yield the episodes after the request's cursor that pass its filters, newest first, with their kinds."""
        kinds = [wanted.kind] if wanted.kind is not None else [*self._router.episodes]
        waiting: dict[str, Sequence[ListedEpisode]] = dict.fromkeys(kinds, ())
        last: dict[str, EpisodePlace | None] = dict.fromkeys(kinds, wanted.after)
        left, pace = set(kinds), Pace()
        batch = BATCH if wanted.filters else min(BATCH, wanted.limit + 1)
        while True:
            for kind in [each for each in kinds if each in left and not waiting[each]]:
                views = await self._router.episodes[kind].newest(last[kind], batch)
                if len(views) < batch:
                    left.remove(kind)
                waiting[kind] = await self._wanted_of(views, wanted, pace) if wanted.filters else views
                last[kind] = views[-1].place if views else None
            if any(not waiting[kind] for kind in left):
                continue
            heads = [kind for kind in kinds if waiting[kind]]
            if not heads:
                return
            newest = max(heads, key=lambda kind: waiting[kind][0].place)
            yield newest, waiting[newest][0]
            waiting[newest] = waiting[newest][1:]
            await pace.step()

    async def _wanted_of(self, views: Sequence[ListedEpisode], wanted: Wanted, pace: Pace) -> Sequence[ListedEpisode]:
        found = []
        for view in views:
            if wanted.takes(view.facets(), self._reasons):
                found.append(view)
            await pace.step()
        return found

    def _row(self, kind: str, view: ListedEpisode) -> dict[str, Any]:
        row = view.row()
        return _described(kind, row if self._text else self._hidden.row(row))

    def _wanted(self, request: Request) -> Wanted:
        """Parse a request's parameters.

        Raises:
            BadRequest, NotFound: a parameter or value is unknown; the message names it.
        """
        given = _known(request, PARAMETERS)
        return Wanted(
            limit=_number("limit", given.get("limit"), USUAL, 1, MOST),
            after=_place(given["after"]) if "after" in given else None,
            state=_one_of("state", given.get("state"), STATES),
            kind=_one_of("kind", given.get("kind"), sorted(self._router.episodes)),
            group=given.get("group"),
            reason=_one_of("reason", given.get("reason"), sorted(self._reasons)),
            worker=self._worker(given.get("worker")),
        )

    def _worker(self, name: str | None) -> str | None:
        """Return the URL of a worker given by URL or id. A worker that has left can only be given by URL."""
        if name is None:
            return None
        if ":" in name:
            return parse_worker_url(name).url
        found = (worker for fleet in self._router.fleets.values() for worker in fleet.pool if worker.address.id == name)
        worker = next(found, None)
        if worker is None:
            raise NotFound(f"no worker {name!r} is registered")
        return worker.url

    # One episode

    async def detail(self, request: Request) -> Response:
        given = _known(request, ("turn",))
        first = _number("turn", given.get("turn"), 0, 0, None)
        with Watch(request.receive):
            found = await self._found(request)
            shown: list[bytes] = []
            tree, following, ends, pace = BranchTree(), None, dict[int, bool](), Pace()
            for turn in found.view.turns():
                parent = turn.parent if turn.parent in ends else None
                reason = turn.reason if self._text else self._hidden.reason(turn.reason)
                tree.add_turn(turn.turn, parent, turn.end - turn.start, reason)
                ends[turn.turn] = True
                if parent is not None:
                    ends[parent] = False
                if turn.turn >= first and len(shown) < MOST_TURNS:
                    shown.append(orjson.dumps(self._turn(turn), default=dict))
                elif turn.turn >= first and following is None:
                    following = turn.turn
                await pace.step()
        leaves = [number for number, is_leaf in ends.items() if is_leaf]
        for leaf in leaves:
            tree.end(leaf, leaf)
        about = found.view.about() if self._text else self._hidden.about(found.view.about())
        row = self._row(*found)
        head = {"turns_total": row.pop("turns"), **row, **about, "text": self._text}
        behind = {"next_turn": following, "leaf_turns": leaves, "tree": tree.lines()}
        parts = list_parts((each,) for each in shown)
        body = (_dumped(head)[:-1], b',"turns":', *parts, b",", _dumped(behind)[1:])
        return Response(b"".join(body), media_type=JSON)

    def _turn(self, turn: TurnRow) -> Mapping[str, Any]:
        return vars(turn) if self._text else self._hidden.turn(vars(turn))

    @cached_property
    def _reasons(self) -> set[str]:
        """The fixed names of reasons; any other reason is free text."""
        return {OTHER_REASON, *(reason for source in self._router.episodes.values() for reason in source.reasons)}

    @cached_property
    def _hidden(self) -> HiddenTexts:
        return HiddenTexts(self._reasons)

    def _in_any_process(
        self, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Wrap a handler: if it raises NotFound, return the first answer of another process that has the episode."""

        async def asked(request: Request) -> Response:
            try:
                return await answer(request)
            except NotFound:
                elsewhere = await self._router.owners.first_answer(request.scope, b"")
                if elsewhere is None:
                    raise
                status, headers, body = elsewhere
                return Response(body, status, media_type=headers.get("content-type"))

        return asked

    async def _found(self, request: Request) -> Found:
        """Return the episode whose id is in the path.

        Raises:
            NotFound: no middleware of this process holds it.
        """
        name: str = request.path_params["id"]
        for kind, source in self._router.episodes.items():
            view = await source.find(name)
            if view is not None:
                return Found(kind, view)
        raise NotFound(f"no episode {name!r} is held")

    # Its tokens

    async def tokens(self, request: Request) -> Response:
        given = _known(request, ("leaf", "start", "stop"))
        leaf = None if "leaf" not in given else _number("leaf", given["leaf"], 0, 0, None)
        with Watch(request.receive):
            found = await self._found(request)
            line = found.view.line(leaf)
            part = _part(given, len(line.trajectory))
            binary = BINARY in request.headers.get("accept", "")
            hide = None if self._text else self._hidden.turn_of_line
            write = partial(written_slice, found.view.place[1], line, part, self._vocabulary, hide, binary=binary)
            body = await asyncio.get_running_loop().run_in_executor(self._thread, write)
        return Response(body, media_type=BINARY if binary else JSON)


def _pauses(router: Router) -> list[dict[str, Any]]:
    """Return the periods in which each pool's gate was closed, oldest first; of a further trained model, its own."""
    gates = [(name, each.gate) for name, each in router.fleets.items() if not router.mount or each is router.fleet]
    every = ({**each._asdict(), "model_id": name or None} for name, gate in gates for each in gate.times())
    return sorted(every, key=lambda each: each["start"])


def _described(kind: str, row: EpisodeRow) -> dict[str, Any]:
    return {"id": row.id, "kind": kind, **vars(row)}


def _known(request: Request, names: Sequence[str]) -> Mapping[str, str]:
    """Return the query parameters of a request.

    Raises:
        BadRequest: one is not in `names`, or is given twice.
    """
    for name in request.query_params:
        if name not in names:
            known = ", ".join(names) or "none"
            raise BadRequest(f"unknown parameter {name!r}; known are {known}")
        if len(request.query_params.getlist(name)) > 1:
            raise BadRequest(f"{name} is given twice; give it once")
    return dict(request.query_params)


def _number(name: str, text: str | None, usual: int, least: int, most: int | None) -> int:
    if text is None:
        return usual
    if text.isascii() and text.isdecimal() and len(text) <= 18 and least <= int(text) <= (most or int(text)):
        return int(text)
    upto = "" if most is None else f" to {most}"
    raise BadRequest(f"{name} must be a whole number from {least}{upto}, got {text!r}")


def _one_of(name: str, text: str | None, known: Sequence[str]) -> str | None:
    if text is None or text in known:
        return text
    if not known:
        raise BadRequest(f"{name}={text!r} matches nothing: no middleware of this router holds episodes")
    raise BadRequest(f"{name} must be one of {', '.join(known)}, got {text!r}")


def _cursor(started_at: float, name: str) -> str:
    return f"{started_at!r}{BETWEEN}{name}"


def _place(cursor: str) -> EpisodePlace:
    began, between, name = cursor.partition(BETWEEN)
    try:
        started_at = float(began)
    except ValueError:
        started_at = math.nan
    if not between or not name or not math.isfinite(started_at):
        raise BadRequest(f"after must be the `next` value of an earlier page, got {cursor!r}")
    return started_at, name


def _part(given: Mapping[str, str], length: int) -> Slice:
    start = _number("start", given.get("start"), 0, 0, length)
    stop = _number("stop", given.get("stop"), min(length, start + MOST_TOKENS), start, length)
    if stop - start > MOST_TOKENS:
        raise BadRequest(f"stop - start may be {MOST_TOKENS} at most, not {stop - start}")
    return Slice(start, stop)


def _json(content: object) -> Response:
    return Response(_dumped(content), media_type=JSON)


def _dumped(content: object) -> bytes:
    return orjson.dumps(content, default=dict)
