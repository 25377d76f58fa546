"""Request audits of a router's episodes (sessions and text rollouts), one at a time."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from middleware_hub.auditing.tool.verdict import AuditedEpisodes
from miles_router.client import ErrorReply, InvalidReply, NotFound, RouterClient
from miles_router.client.errors import convert_errors

#: Candidate episodes for each wanted sample: the most recently used ones, since their weights are probably loaded.
DRAWN_FROM = 8
#: Samples audited per episode if the user names no episodes.
OF_EACH = 4
#: Samples audited per named episode, at most: the router's own bound.
MOST = 64
#: Statuses of `GET /episodes` if no middleware has that route: a worker answers it, or it needs the administration key.
NOBODY_ANSWERS = (401, 404)
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Sampling:
    """The choice of episodes to audit.

    Attributes:
        count: how many samples with something to compare are enough.
        episodes: ids of the episodes; empty for a random choice.
        rate: episodes per second.
        seed: seed of the random choice.
    """

    count: int
    episodes: Sequence[str] = ()
    rate: float = 2.0
    seed: int | None = None


async def collect(client: RouterClient, wanted: Sampling, progress: Progress) -> AuditedEpisodes:
    """Audit episodes until there are enough samples, or no more episodes. Drawn episodes that are gone are skipped.

    Raises:
        RouterClientError: a request failed, or the router does not hold an episode that the user named.
    """
    found, compared = AuditedEpisodes(), 0
    names = list(dict.fromkeys(wanted.episodes)) or await _drawn(client, wanted)
    loop, of = asyncio.get_running_loop(), len(names) if wanted.episodes else wanted.count
    due = loop.time()
    for place, name in enumerate(names):
        progress(place if wanted.episodes else compared, of)
        if compared >= wanted.count and not wanted.episodes:
            break
        await asyncio.sleep(due - loop.time())
        due = max(due, loop.time()) + 1 / wanted.rate
        try:
            limit = min(MOST, wanted.count) if wanted.episodes else min(OF_EACH, wanted.count - compared)
            answer = await client.audit(name, limit=limit)
        except NotFound:
            if wanted.episodes:
                raise
            continue
        with convert_errors(f"an audit of {name}"):
            compared += found.add(answer)
    progress(of, of)
    return found


async def _drawn(client: RouterClient, wanted: Sampling) -> list[str]:
    try:
        episodes = await client.episodes()
    except ErrorReply as error:
        if error.status in NOBODY_ANSWERS:
            error.message += "; a router has no GET /episodes unless a middleware records sessions or text rollouts"
        raise
    try:
        held = ((float(each["last_used_at"]), str(each["id"])) for each in episodes)
        names = [name for _, name in heapq.nlargest(wanted.count * DRAWN_FROM, held)]
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidReply(f"GET /episodes returned malformed episodes: {error!r}") from None
    random.Random(wanted.seed).shuffle(names)
    return names
