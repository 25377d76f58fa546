"""`POST /sessions/{id}/audit`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from middleware_hub.openai_session.audit.auditor import Auditor
from middleware_hub.openai_session.export.routes import JSON, read_object
from middleware_hub.openai_session.sessions.tree import Session
from miles_router.errors import BadRequest
from miles_router.middlewares import Pace, Watch

LIMIT = "limit"
FIELDS = frozenset({LIMIT})
#: Samples of a session that one request audits: where it does not say, and at most.
USUAL, MOST = 8, 64


class AuditRoute:
    """Answers it. `find` gives the session of an id."""

    def __init__(self, auditor: Auditor, find: Callable[[str], Session]) -> None:
        self._auditor = auditor
        self._find = find

    def routes(self) -> Sequence[BaseRoute]:
        """The route."""
        return [Route("/sessions/{session_id}/audit", self._audit, methods=["POST"])]

    async def _audit(self, request: Request) -> Response:
        session = self._find(request.path_params["session_id"])
        limit = _limit(await read_object(request))
        with Watch(request.receive):
            answer = await self._auditor.audit(session, limit)
            pace, samples = Pace(), []
            for sample in answer["samples"]:  # each may have the logprobs of a whole context
                samples.append(orjson.Fragment(orjson.dumps(sample, option=orjson.OPT_SERIALIZE_NUMPY)))
                await pace.step()
        return Response(orjson.dumps({**answer, "samples": samples}), media_type=JSON)


def _limit(body: Mapping[str, object]) -> int:
    """How many samples are to be audited.

    Raises:
        BadRequest: a field is unknown, or the number is none.
    """
    if unknown := body.keys() - FIELDS:
        raise BadRequest(f"unknown field {min(unknown)!r}; known are {', '.join(sorted(FIELDS))}")
    limit = body.get(LIMIT, USUAL)
    if type(limit) is not int or not 1 <= limit <= MOST:
        raise BadRequest(f"{LIMIT} must be a whole number from 1 to {MOST}")
    return limit
