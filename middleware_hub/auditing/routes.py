"""`GET /episodes` and `POST /episodes/{id}/audit`, for the episodes of all layers in all processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from middleware_hub.auditing.audits import Audits
from middleware_hub.auditing.samples import AuditReport
from miles_router.errors import BadRequest, NotFound
from miles_router.middlewares import Exchange, Pace, Watch
from miles_router.trajectory.json_parts import list_parts

JSON = "application/json"
LIMIT = "limit"
FIELDS = frozenset({LIMIT})
EPISODES, AUDIT = "/episodes/", "/audit"
#: Samples of an episode that one request audits: by default, and at most.
USUAL, MOST = 8, 64


def audit_routes(audits: Audits) -> Sequence[BaseRoute]:
    """Return the routes; every layer with audits returns the same ones."""
    return [
        Route("/episodes", partial(_list_episodes, audits), methods=["GET"]),
        Route(f"{EPISODES}{{id}}{AUDIT}", partial(_audit, audits), methods=["POST"]),
    ]


def audited_episode(path: str) -> str | None:
    """Return the id of the episode that this path audits, or None. A layer whose ids name their process must report
    it as the request's owner: the whole request is then forwarded there. Asking the other processes while they wait
    would take too long, since an audit is as slow as the engines."""
    if not path.startswith(EPISODES) or not path.endswith(AUDIT):
        return None
    return path[len(EPISODES) : -len(AUDIT)] or None


async def _list_episodes(audits: Audits, request: Request) -> Response:
    parts: list[tuple[bytes, ...]] = []
    pace = Pace()
    for kind, source in audits.sources.items():
        async for each in source.list_episodes():
            parts.append((orjson.dumps({"kind": kind, **each._asdict()}),))
            await pace.step()
    for answer in await audits.owners.answers(request.scope):
        parts += [(orjson.dumps(each),) for each in answer["episodes"]]
        await pace.step()
    return Response(b"".join((b'{"episodes":', *list_parts(parts), b"}")), media_type=JSON)


async def _audit(audits: Audits, request: Request) -> Response:
    episode_id, limit = request.path_params["id"], await read_limit(request)
    with Watch(request.receive):
        for kind, source in audits.sources.items():
            report = await source.audit(episode_id, limit)
            if report is not None:
                return await written_report({"id": episode_id, "kind": kind}, report)
        elsewhere = await audits.owners.first_answer(request.scope, orjson.dumps({LIMIT: limit}))
    if elsewhere is None:
        raise NotFound(f"no episode {episode_id!r} is held")
    status, headers, body = elsewhere
    return Response(body, status, media_type=headers.get("content-type"))


async def written_report(named: Mapping[str, object], report: AuditReport) -> Response:
    """Return the response for a report; `named` are the fields that identify the episode."""
    pace, samples = Pace(), []
    for sample in report.samples:  # encoded one by one: each may contain the logprobs of a full context
        samples.append(orjson.Fragment(orjson.dumps(sample, option=orjson.OPT_SERIALIZE_NUMPY)))
        await pace.step()
    found = {"weight_version": report.weight_version, "samples": samples, "prompts": report.prompts.as_json()}
    return Response(orjson.dumps({**named, **found}), media_type=JSON)


async def read_limit(request: Request) -> int:
    """Return how many samples to audit, from the request's body.

    Raises:
        BadRequest: the body is not an object, has an unknown field, or the number is out of range.
    """
    exchange = Exchange.of(request.scope)
    raw = await exchange.read(request.receive)
    body = exchange.loads(raw) if raw.strip() else {}
    if not isinstance(body, Mapping):
        raise BadRequest("the request body must be a JSON object")
    if unknown := body.keys() - FIELDS:
        raise BadRequest(f"unknown field {min(unknown)!r}; known are {', '.join(sorted(FIELDS))}")
    limit = body.get(LIMIT, USUAL)
    if type(limit) is not int or not 1 <= limit <= MOST:
        raise BadRequest(f"{LIMIT} must be a whole number from 1 to {MOST}")
    return limit
