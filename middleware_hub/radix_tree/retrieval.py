"""`POST /retrieve_from_text`: the exact tokens of a text, for the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from middleware_hub.radix_tree.dashboard.rollouts import TextRollouts
from middleware_hub.radix_tree.entry import Entry
from middleware_hub.radix_tree.recording import TextRecorder
from miles_router.errors import BadRequest, NotFound
from miles_router.middlewares import Exchange, Pace, RowMatch, TrajectoryRows, Watch
from miles_router.trajectory import Retrieved, Trajectory
from miles_router.trajectory.json_parts import AT_ONCE, list_parts
from miles_router.trajectory.retrieved import write_safetensors
from miles_router.trajectory.rows import RowKind

BINARY, JSON = "application/octet-stream", "application/json"
MAX_TEXTS = 4096
FIELDS = frozenset({"text", "texts", "rid", "strict", "return_logp"})


class Retrieval:
    """Answers from one cache."""

    def __init__(self, recorder: TextRecorder, rollouts: TextRollouts) -> None:
        self._recorder = recorder
        self._rollouts = rollouts
        self._cache = recorder.cache

    async def answer(self, request: Request) -> Response:
        """One text, or with `texts` a list of them; safetensors where the client accepts `application/octet-stream`.

        Raises:
            BadRequest: a field is missing, unknown or of the wrong type.
            NotFound: no such `rid`; with `strict`, a text that no recorded tokens spell from end to end.
            StateError: nobody can tell what is recorded.
        """
        exchange = Exchange.of(request.scope)
        asked = _checked(exchange.loads(await exchange.read(request.receive)))
        texts, strict, pace = asked.get("texts"), bool(asked.get("strict")), Pace()
        with Watch(request.receive):
            if texts is None:
                found = [await self._one(asked.get("text"), asked.get("rid"), strict=strict)]
            else:
                found = [await self._one_of_many(text, pace, strict=strict) for text in texts]
            if BINARY in request.headers.get("accept", ""):
                write, media_type = partial(write_safetensors, found, many=texts is not None), BINARY
            else:
                shown = bool(asked.get("return_logp", True))
                write, media_type = partial(_write_json, found, many=texts is not None, with_logprobs=shown), JSON
            large = sum(map(len, found)) > AT_ONCE
            return Response(await asyncio.to_thread(write) if large else write(), media_type=media_type)

    async def _one_of_many(self, text: str, pace: Pace, *, strict: bool) -> Retrieved:
        await pace.step()
        return await self._one(text, None, strict=strict)

    def rows(self, kind: RowKind, asked: Mapping[str, Any]) -> RowMatch:
        """The newest generation with exactly this text; its `rid` tells which that is.

        Raises:
            NotFound: no generation has it.
        """
        _check_text(asked["text"])
        entries = self._cache.retrieve(asked["text"])
        if not entries:
            raise NotFound("no generation has this text from end to end")
        newest = entries[-1]
        return RowMatch(newest.rows.get(kind) or TrajectoryRows(None), len(newest), newest.rid)

    async def _one(self, text: str | None, rid: str | None, *, strict: bool) -> Retrieved:
        self._cache.statistics.retrievals += 1
        if text is not None:
            await self._recorder.archive.load(text)
        if rid is not None:
            await self._recorder.archive.load_rid(rid)
            return self._by_rid(rid, text)
        assert text is not None
        entries = self._cache.retrieve(text)
        if entries:
            return self._newest(text, entries)
        given = await self._recorder.tokenize_text(text)
        matched = len(given.match.trajectory)
        if strict and matched < len(given.trajectory):
            raise NotFound(
                f"only {given.match.chars} of the text's {len(text)} characters are spelled by recorded tokens"
            )
        if given.match.entry is not None:
            self._rollouts.read(given.match.entry, matched)
        return Retrieved(given.trajectory, text, matched)

    def _by_rid(self, rid: str, text: str | None) -> Retrieved:
        entry = self._cache.by_rid(rid)
        if entry is None:
            raise NotFound(f"no generation {rid!r} is held")
        shown = self._cache.text_of(entry)
        if text is not None and text != shown:
            raise BadRequest(f"generation {rid!r} has another text")
        self._rollouts.read(entry, len(entry))
        return _of_entry(entry, shown, entry.trajectory(), (rid,))

    def _newest(self, text: str, entries: list[Entry]) -> Retrieved:
        """The newest of several; those that differ from it in their ids make the answer ambiguous."""
        newest = entries[-1]
        trajectory = newest.trajectory()
        others = [each for each in entries[:-1] if not np.array_equal(each.trajectory().tokens, trajectory.tokens)]
        self._cache.statistics.ambiguous += bool(others)
        candidates = tuple(each.rid for each in (*others, newest))
        self._rollouts.read(newest, len(newest))
        return _of_entry(newest, text, trajectory, candidates)


def _of_entry(entry: Entry, text: str, trajectory: Trajectory, candidates: tuple[str, ...]) -> Retrieved:
    return Retrieved(
        trajectory=trajectory,
        text=text,
        matched_tokens=len(trajectory),
        candidates=candidates,
        rid=entry.rid,
        finish_reason=entry.finish,
        finished=entry.finished,
        cache_versions=entry.cache_versions,
    )


def _write_json(found: Sequence[Retrieved], *, many: bool, with_logprobs: bool) -> bytes:
    written = [each.json_parts(with_logprobs=with_logprobs) for each in found]
    return b"".join(list_parts(written) if many else written[0])


def _checked(asked: Any) -> Mapping[str, Any]:
    if not isinstance(asked, Mapping):
        raise BadRequest("the request body must be a JSON object")
    if unknown := set(asked) - FIELDS:
        raise BadRequest(f"unknown field {min(unknown)!r}; known are {', '.join(sorted(FIELDS))}")
    for name, wanted in (("text", str), ("rid", str), ("strict", bool), ("return_logp", bool), ("texts", list)):
        if asked.get(name) is not None and not isinstance(asked[name], wanted):
            raise BadRequest(f"{name} must be a {wanted.__name__}")
    texts = asked.get("texts")
    if texts is None:
        if asked.get("text") is None and asked.get("rid") is None:
            raise BadRequest("text, texts or rid is required")
        _check_text(asked.get("text"))
        return asked
    if asked.get("text") is not None or asked.get("rid") is not None:
        raise BadRequest("texts goes with neither text nor rid")
    if not texts or len(texts) > MAX_TEXTS:
        raise BadRequest(f"texts must hold 1 to {MAX_TEXTS} texts")
    for text in texts:
        _check_text(text if isinstance(text, str) else "")
    return asked


def _check_text(text: str | None) -> None:
    if text == "":
        raise BadRequest("a text must be a string that is not empty")
