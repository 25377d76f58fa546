"""Asks a router for audits of its sessions, one at a time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from miles_router.audit.verdict import AuditedSessions
from miles_router.client import InvalidReply, NotFound, RouterClient
from miles_router.client.errors import reading

#: Sessions of which those to audit are drawn, for each sample: the ones used last, whose weights are loaded still.
DRAWN_FROM = 8
#: Samples of one session that are audited where no session is named.
OF_EACH = 4
#: And at most of one that is: the router's own bound.
MOST = 64
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Sampling:
    """Which sessions are audited.

    Attributes:
        count: samples with something to compare that are enough.
        sessions: their ids; any where there are none.
        rate: sessions asked for in a second.
        seed: of the choice.
    """

    count: int
    sessions: Sequence[str] = ()
    rate: float = 2.0
    seed: int | None = None


async def collect(client: RouterClient, wanted: Sampling, progress: Progress) -> AuditedSessions:
    """Audit sessions until there is enough, or no other. One that is gone meanwhile is left out.

    Raises:
        RouterClientError: the router cannot be asked, or a session that was named is not held.
    """
    found, compared = AuditedSessions(), 0
    names = list(wanted.sessions) or await _drawn(client, wanted)
    loop, of = asyncio.get_running_loop(), len(names) if wanted.sessions else wanted.count
    due = loop.time()
    for place, name in enumerate(names):
        progress(place if wanted.sessions else compared, of)
        if compared >= wanted.count and not wanted.sessions:
            break
        await asyncio.sleep(due - loop.time())
        due = max(due, loop.time()) + 1 / wanted.rate
        try:
            limit = min(MOST, wanted.count) if wanted.sessions else min(OF_EACH, wanted.count - compared)
            answer = await client.session(name).audit(limit=limit)
        except NotFound:
            if wanted.sessions:
                raise
            continue
        with reading(f"an audit of {name}"):
            compared += found.add(answer)
    progress(of, of)
    return found


async def _drawn(client: RouterClient, wanted: Sampling) -> list[str]:
    sessions = await client.sessions()
    try:
        held = [(float(each["last_used_at"]), str(each["session_id"])) for each in sessions if each["turns"]]
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidReply(f"GET /sessions was answered with what are no sessions: {error!r}") from None
    names = [name for _, name in sorted(held, reverse=True)[: wanted.count * DRAWN_FROM]]
    random.Random(wanted.seed).shuffle(names)
    return names
