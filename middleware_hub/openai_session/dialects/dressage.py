"""Dressage's dialect (Accio-Lab/Dressage at de8e8694): sessions for clients that name them in headers and never create
them.

the path of each agent API   with X-Session-Id, X-Instance-Id, X-Turn-Id: a step of a turn; the first one creates the
                             session
POST /session/finalize       refuse further turns; the session becomes readable, built as `token_build_mode` and `mask`
                             ask
POST /session/discard        forget the session in any state
POST /trajectory/read        the samples of one finalized session, or of all, with the fields of its reader and of the
                             router; `drain` forgets them
GET  /trajectory/stats
POST /v1/rollout/pause, /v1/rollout/resume;  GET /v1/rollout/pause_state
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from middleware_hub.openai_session.dialects.dressage_segments import VIEW, segments_of
from middleware_hub.openai_session.episodes.contract import NO_CONTRACT, SessionStatus
from middleware_hub.openai_session.episodes.reading import read_contract
from middleware_hub.openai_session.errors import ContextOverflow
from middleware_hub.openai_session.export.routes import SessionRoutes, as_response, read_object
from middleware_hub.openai_session.export.samples import SamplePlan, SampleRequest, untraced_in_words
from middleware_hub.openai_session.sessions.session import Session
from middleware_hub.openai_session.sessions.store import is_session_name
from middleware_hub.openai_session.turns.endpoint import SessionEndpoint
from miles_router.engines import paths
from miles_router.errors import BadRequest, BodyTooLarge, Conflict, RouterError, UpstreamError
from miles_router.middlewares import Exchange, Receive, Router, Scope, Send, first_header
from miles_router.middlewares.generation import asks_for_evaluation
from miles_router.middlewares.state import BODY_SAYS
from miles_router.trajectory.json_parts import list_parts
from miles_router.trajectory.sample import CARRIED

SESSION, INSTANCE, TURN, ROUTING = b"x-session-id", b"x-instance-id", b"x-turn-id", b"x-smg-routing-key"
ROLLOUT = "/v1/rollout/"
#: Paths of requests whose body names the session.
BY_BODY = frozenset({"/session/finalize", "/session/discard", "/trajectory/read"})
#: Pause modes of the dialect, each with the router's mode; `preempt` loses no tokens.
MODES = {"preempt": "retract", "abort": "abort", "retract": "retract", "in_place": "in_place"}
#: Names of instances and weight versions; clients also send numbers.
Name = str | int
MAX_NAME = 256
#: The dialect's names of a full context window, and of a turn that weights of another version would answer.
WINDOW_FULL, VERSION_CHANGED = "context_overflow", "trajectory_version_changed"
REWRITTEN = ("edited_history", "compaction")
#: The dialect's names of builds, including older ones.
BUILD_MODES = {"tito": "concat", "concat": "concat", "snapshot": "last_step", "last_step": "last_step"}


class DressageDialect:
    """Handlers of the dialect's requests."""

    def __init__(
        self,
        router: Router,
        sessions: SessionRoutes,
        endpoint: SessionEndpoint,
        *,
        one_weight_version: bool = False,
        context_window: int = 0,
    ) -> None:
        self._router = router
        self._one_weight_version = one_weight_version
        window = {"budget": {"max_context": context_window}}
        self._contract = read_contract(window) if context_window else NO_CONTRACT
        self._sessions = sessions
        self._endpoint = endpoint
        self._draining: set[str] = set()  # sessions that a running request reads and then deletes

    def routes(self) -> Sequence[BaseRoute]:
        """Return the routes under the dialect's own path segments."""
        return [
            Route("/session/finalize", self._finalize, methods=["POST"]),
            Route("/session/discard", self._discard, methods=["POST"]),
            Route("/trajectory/read", self._read, methods=["POST"]),
            Route("/trajectory/stats", self._stats, methods=["GET"]),
        ]

    def owner_name(self, scope: Scope) -> str | None:
        """Return the session that the headers name, or `BODY_SAYS` where the body names it."""
        path = scope["path"]
        if path in BY_BODY:
            return BODY_SAYS
        return _session_id(scope) if path.startswith("/v1/") and not path.startswith(ROLLOUT) else None

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Answer a request under `/v1` if it belongs to the dialect; otherwise return False."""
        path, method = scope["path"], scope["method"]
        name = _session_id(scope)
        if name is not None and self._endpoint.is_turn(scope):
            await self._turn(name, scope, receive, send)
            return True
        held = name is not None and name in self._sessions.store
        if held and await self._endpoint.answer_other(self._sessions.store.get(name or ""), scope, receive, send):
            return True
        if not path.startswith(ROLLOUT) or (method, path) not in self._control_routes():
            return False
        response = await self._control_routes()[method, path](Request(scope, receive))
        await response(scope, receive, send)
        return True

    async def _turn(self, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        given = first_header(scope["headers"], INSTANCE)
        instance = None if given is None else _checked_name("X-Instance-Id", given.decode("latin-1"))
        evaluates = asks_for_evaluation(scope["headers"])
        contract = read_contract({**self._contract.given, "evaluation": True}) if evaluates else self._contract
        session = self._sessions.store.get_or_create(name, contract)
        if evaluates and not session.is_evaluation:
            raise Conflict(f"session {name!r} began without X-Evaluation, and is not an evaluation")
        if instance is not None:
            session.metadata.setdefault("instance_id", instance)
        try:
            self._check_version(session, scope)
            await self._endpoint.turn(session, scope, receive, send)
        except ContextOverflow as error:
            raise self._as_window_error(error, session, scope) from None
        finally:
            self._sessions.store.drop_unused(session)

    def _as_window_error(self, error: ContextOverflow, session: Session, scope: Scope) -> RouterError:
        """Convert an error about a full context to the form that the proxies in the framework's sandboxes expect. This
        applies to chat where `context_window` is set. Other readers find OpenAI's form under `error`."""
        if error.overflow is None or not self._contract.given or scope["path"] != paths.CHAT:
            return error
        turn_id, tokens = first_header(scope["headers"], TURN), error.overflow.prompt
        details = {
            "phase": "input",
            "context_window": error.overflow.limit,
            "input_tokens": tokens,
            "output_tokens": 0,
            "total_tokens": tokens,
            "session_id": session.id,
            "turn_id": None if turn_id is None else turn_id.decode("latin-1"),
            "last_proxy_step_recorded": False,
        }
        full = BodyTooLarge(str(error))
        fields = {"code": WINDOW_FULL, "message": str(error), "details": details}
        Exchange.of(scope).error_body = lambda _, request_id: {**fields, **error.body(request_id)}
        return full

    def _check_version(self, session: Session, scope: Scope) -> None:
        """Refuse a turn that other weights would answer, in the dialect's form.

        Raises:
            UpstreamError: the fleet's weights differ from the weights that answered the session.
        """
        current = self._router.pool.weight_version
        if not self._one_weight_version or current is None:
            return
        before = session.weight_versions
        if not before or current in before:
            return
        error = UpstreamError(f"weights {current} cannot continue answers of {', '.join(sorted(before))}")
        detail = {
            "error": VERSION_CHANGED,
            "message": str(error),
            "previous_versions": sorted(before),
            "new_versions": [current],
            "session_id": session.id,
            "instance_id": session.metadata.get("instance_id"),
        }
        Exchange.of(scope).error_body = lambda error, request_id: {"detail": detail, **error.body(request_id)}
        raise error

    def _control_routes(self) -> Mapping[tuple[str, str], Callable[[Request], Awaitable[Response]]]:
        return {
            ("POST", "/v1/rollout/pause"): self._pause,
            ("POST", "/v1/rollout/resume"): self._resume,
            ("GET", "/v1/rollout/pause_state"): self._pause_state,
        }

    async def _finalize(self, request: Request) -> Response:
        parsed = await read_object(request)
        name = self._owned_session(request, parsed)
        await self._sessions.archive.load(name)
        session = self._sessions.store.get(name)
        if not session.turns:
            raise BadRequest(f"the session has no turns{untraced_in_words(session)}")
        instance, carried = _name(parsed, "instance_id"), {name: parsed[name] for name in CARRIED if name in parsed}
        if "token_build_mode" in parsed:
            mode = parsed["token_build_mode"]
            if not isinstance(mode, str) or mode not in BUILD_MODES:
                raise BadRequest(f"token_build_mode must be one of {', '.join(BUILD_MODES)}")
            carried["build"] = BUILD_MODES[mode]
        carried |= {name: parsed[name] for name in ("mask", "side_calls") if name in parsed}
        SampleRequest.read(carried)
        self._sessions.store.finalize(session, carried)
        if instance is not None:
            session.metadata["instance_id"] = instance
        await self._sessions.archive.save(session)
        return as_response(
            {
                "success": True,
                "session_id": session.id,
                "trajectory_id": session.id,
                "instance_id": session.metadata.get("instance_id"),
                "num_steps": len(session.turns),
                "num_turns": len({turn.facts.get("turn_id") or turn.number for turn in session.turns}),
                "num_segments": len(session.leaves()),
                "history_rewritten": any(found.reason in REWRITTEN for found in session.history.classified()),
            }
        )

    async def _discard(self, request: Request) -> Response:
        name = self._owned_session(request, await read_object(request))
        await self._sessions.archive.load(name)
        self._sessions.store.forget_lost(name)
        session = self._sessions.store.find(name)
        removed = session.leaves() if session is not None and session.ending.status is SessionStatus.FINALIZED else []
        if session is not None:
            async with self._sessions.archive.deleting([session]):
                self._sessions.store.delete(session)
        about = {"session_removed": session is not None, "segments_removed": len(removed)}
        return as_response({"success": True, "session_id": name, **about})

    async def _read(self, request: Request) -> Response:
        parsed = await read_object(request)
        drain = False if parsed.get("drain") is None else parsed["drain"]
        if not isinstance(drain, bool):
            raise BadRequest("drain must be true or false")
        if parsed.get("segment_view") not in (None, VIEW):
            raise BadRequest(f"segment_view must be {VIEW!r}: a segment is a line of turns")
        if parsed.get("session_id") is not None or parsed.get("trajectory_id") is not None:
            name = self._owned_session(request, parsed)
            await self._sessions.archive.load(name)
            session = self._sessions.store.get(name)
            if session.is_evaluation:
                raise BadRequest(f"session {name!r} is an evaluation, not a trajectory: read it at /sessions/{name}")
            sessions, mode = [session] if session.ending.status is SessionStatus.FINALIZED else [], "trajectory"
        elif self._sessions.store.owners.several:
            raise BadRequest("this router has several processes: set session_id to read one trajectory")
        else:
            await self._sessions.archive.load_all(lambda head: head["finalized"] is not None)
            found = self._batch(_name(parsed, "instance_id"), parsed.get("max_groups"), drain=drain)
            sessions, mode = found, "batch"
        draining = {session.id for session in sessions} if drain else set()
        if draining & self._draining:
            raise BadRequest("the session is being drained by another request")
        self._draining |= draining  # a concurrent drain skips these sessions
        try:
            write = partial(segments_of, [(session, self._plan(session)) for session in sessions])
            data = await self._sessions.run_in_thread(request, write)
            if drain:  # on disk first: a session that cannot be deleted there stays, and can be drained again
                async with self._sessions.archive.deleting(sessions):
                    for session in sessions:
                        self._sessions.store.delete(session)
        finally:
            self._draining -= draining
        before = orjson.dumps({"success": bool(data), "mode": mode})[:-1]
        behind = orjson.dumps({"meta_info": self._counts(), "drained": drain})[1:]
        body = b"".join((before, b',"data":', *list_parts((each,) for each in data), b",", behind))
        return Response(body, media_type="application/json")

    def _owned_session(self, request: Request, parsed: Mapping[str, Any]) -> str:
        """Return the session that a body names; continue only in the process that owns it."""
        name = _named_session(parsed)
        self._sessions.store.owners.require(request.scope, name)
        return name

    def _batch(self, instance_id: Name | None, max_groups: object, *, drain: bool) -> list[Session]:
        """Return the finalized sessions of the first `max_groups` groups, oldest first. With `drain`, sessions that
        another request drains are left out."""
        if max_groups is not None and (type(max_groups) is not int or max_groups < 1):
            raise BadRequest("max_groups must be a whole number from 1")
        groups: dict[Name, list[Session]] = {}
        for session in self._of_training():
            group = _group(session)
            if drain and session.id in self._draining:
                continue
            if session.ending.status is SessionStatus.FINALIZED and (instance_id is None or group == instance_id):
                groups.setdefault(group, []).append(session)
        return [session for group in list(groups.values())[:max_groups] for session in group]

    def _plan(self, session: Session) -> SamplePlan:
        return self._sessions.maker.plan(session, SampleRequest.read(session.finalized_with))

    async def _stats(self, request: Request) -> Response:
        await self._sessions.archive.load_all(lambda head: True)
        own = self._counts()
        own_part = {**own, "names": [*map(str, self._groups())]} if self._sessions.store.owners.several else own
        if not self._sessions.store.owners.others(request.scope):  # the only process, or a request of another process
            return as_response(own_part)
        all_of_them = [own_part, *await self._sessions.store.owners.answers(request.scope)]
        summed = {name: sum(each[name] for each in all_of_them) for name in own}
        groups = {name for each in all_of_them for name in each["names"]}  # processes may share groups
        named = {"names": sorted(groups)} if self._sessions.store.owners.asked_by_other_process(request.scope) else {}
        return as_response({**summed, "groups": len(groups), **named})

    def _groups(self) -> set[Name]:
        return {_group(each) for each in self._of_training() if each.ending.status is SessionStatus.FINALIZED}

    def _of_training(self) -> list[Session]:
        """Return all sessions but evaluations."""
        return [session for session in self._sessions.store if not session.is_evaluation]

    def _counts(self) -> dict[str, Any]:
        sessions = self._of_training()
        finalized = sum(session.ending.status is SessionStatus.FINALIZED for session in sessions)
        return {
            "trajectories": finalized,
            "groups": len(self._groups()),
            "active_sessions": len(sessions) - finalized,
            "bytes": self._sessions.store.nbytes,
        }

    async def _pause(self, request: Request) -> Response:
        name = (await read_object(request)).get("mode", "preempt")
        mode = MODES.get(name) if isinstance(name, str) else None
        if mode is None:
            raise BadRequest(f"mode must be one of {', '.join(MODES)}")
        paused = await self._router.control.pause(mode, Exchange.of(request.scope).request_id)
        return self._state_after(paused.status, paused.body)

    async def _resume(self, request: Request) -> Response:
        version = _name(await read_object(request), "version")
        if version is not None and str(version) != self._router.pool.weight_version:
            named = await self._router.control.name_version(str(version), Exchange.of(request.scope).request_id)
            if named.status != 200:
                return self._state_after(named.status, named.body)
        answer = await self._router.control.continue_generation(Exchange.of(request.scope).request_id)
        return self._state_after(answer.status, answer.body)

    def _state_after(self, status: int, body: bytes) -> Response:
        """Return the state of the rollout after a control request, or the reply of a failed one."""
        if status != 200:
            return Response(body, status, media_type="application/json")
        return as_response({"status": "ok", **self._state()})

    async def _pause_state(self, request: Request) -> Response:
        state, others = self._state(), await self._sessions.store.owners.answers(request.scope)
        waiting = self._router.gate.held + sum(each["waiting"] for each in others)  # the other fields are global
        return as_response({**state, "waiting": waiting})

    def _state(self) -> dict[str, object]:
        gate, pool = self._router.gate, self._router.pool
        return {
            "paused": gate.closed,
            "mode": gate.mode,
            "paused_since": gate.paused_since,
            "waiting": gate.held,
            "in_flight": pool.in_flight,
            "version": pool.weight_version,
        }


def _session_id(scope: Scope) -> str | None:
    """Return the session that the headers name, or None.

    A routing key names a session only together with X-Instance-Id or X-Turn-Id; alone it is for affinity. Without these
    headers, a name that no session can have is also for affinity; with them, it is refused later.
    """
    headers = scope["headers"]
    own = first_header(headers, INSTANCE) is not None or first_header(headers, TURN) is not None
    given = first_header(headers, SESSION)
    if given is None and own:
        given = first_header(headers, ROUTING)
    name = given.decode("latin-1") if given else None
    # Agents send other names in this header, such as "channel/thread"; these are for affinity.
    return name if name is None or own or is_session_name(name) else None


def _group(session: Session) -> Name:
    """Return the group of a session: `instance_id` of its unchecked metadata, or else the session's id."""
    instance = session.metadata.get("instance_id")
    return instance if isinstance(instance, (str, int)) else session.id


def _name(parsed: Mapping[str, Any], field: str) -> Name | None:
    """Return a name in a request, or None if it is absent.

    Raises:
        BadRequest: the name is neither a string nor a whole number, or is too long.
    """
    value = parsed.get(field)
    return None if value is None else _checked_name(field, value)


def _checked_name(field: str, value: object) -> Name:
    if isinstance(value, bool) or not isinstance(value, (str, int)) or len(str(value)) > MAX_NAME:
        raise BadRequest(f"{field} must be a string or a whole number, of at most {MAX_NAME} characters")
    return value


def _named_session(parsed: Mapping[str, Any]) -> str:
    name = parsed.get("session_id", parsed.get("trajectory_id"))
    if not isinstance(name, str):
        raise BadRequest("session_id must be a string")
    return name
