"""`POST /retrieve_from_text`: the exact tokens of a text, for the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response

from middleware_hub.auditing.teachers import TEACHER, TeacherRequest, Teachers
from middleware_hub.radix_tree.dashboard.rollouts import TextRollouts
from middleware_hub.radix_tree.entry import Entry
from middleware_hub.radix_tree.holders import (
    HOLDS,
    SPELLS,
    Answers,
    TextHolders,
    best_process,
    digest,
    other_processes_with,
)
from middleware_hub.radix_tree.recording import TextRecorder
from miles_router.errors import BadRequest, NotFound, Unavailable
from miles_router.middlewares import Exchange, Pace, Scope, Watch
from miles_router.middlewares.rows import RowMatch, TrajectoryRows
from miles_router.middlewares.state import Elsewhere, Owners
from miles_router.trajectory import Retrieved, Trajectory
from miles_router.trajectory.json_parts import AT_ONCE, list_parts
from miles_router.trajectory.retrieved import read_safetensors, read_safetensors_list, write_safetensors
from miles_router.trajectory.rows import RowKind
from miles_router.trajectory.teacher import arrays_of

BINARY, JSON = "application/octet-stream", "application/json"
MAX_TEXTS = 4096
FIELDS = frozenset({"text", "texts", "rid", "strict", "return_logp", "reward", "rewards", TEACHER})


class Retrieval:
    """The handler of `POST /retrieve_from_text`, on one cache."""

    def __init__(
        self, recorder: TextRecorder, rollouts: TextRollouts, holders: TextHolders, owners: Owners, teachers: Teachers
    ) -> None:
        self._recorder = recorder
        self._holders = holders
        self._rollouts = rollouts
        self._owners = owners
        self._teachers = teachers
        self._cache = recorder.cache

    async def answer(self, request: Request) -> Response:
        """Answer with the tokens of one text, or of each text in `texts`.

        The reply is safetensors where the client accepts `application/octet-stream`, else JSON.

        Raises:
            BadRequest: a field is missing, unknown or of the wrong type.
            NotFound: the `rid` is unknown; with `strict`, recorded tokens do not spell all of the text.
            StateError: the store cannot be read.
            RouterError: as `Teachers.find` and `Teacher.score`.
        """
        exchange = Exchange.of(request.scope)
        asked = exchange.loads(await exchange.read(request.receive))
        if (
            self._owners.asked_by_other_process(request.scope)
            and isinstance(asked, Mapping)
            and asked.keys() & {HOLDS, SPELLS}
        ):
            return Response(orjson.dumps(await self._answer_process(asked)), media_type=JSON)
        _check(asked)
        texts, strict, pace = asked.get("texts"), bool(asked.get("strict")), Pace()
        with Watch(request.receive):
            wanted = asked.get(TEACHER)
            teacher = None if wanted is None else await self._teachers.find(TeacherRequest.read(wanted))
            if texts is None:
                found = [await self._retrieve_anywhere(request.scope, asked, strict=strict)]
            elif self._owners.several:
                found = await self._retrieve_many(request.scope, texts, pace, strict=strict)
            else:
                found = [await self._retrieve_paced(text, pace, strict=strict) for text in texts]
            if teacher is not None:
                scores = await teacher.score([each.trajectory for each in found])
                found = [replace(each, teacher=of_it) for each, of_it in zip(found, scores, strict=True)]
            self._rollouts.record_rewards(found, [asked.get("reward")] if texts is None else asked.get("rewards") or ())
            if BINARY in request.headers.get("accept", ""):
                write, media_type = partial(write_safetensors, found, many=texts is not None), BINARY
            else:
                shown = bool(asked.get("return_logp", True))
                write, media_type = partial(_write_json, found, many=texts is not None, with_logprobs=shown), JSON
            # In bytes, because a sampling mask and scores may have far more numbers than the text has tokens.
            scored = sum(array.nbytes for each in found for array in arrays_of(each.teacher).values())
            large = sum(each.trajectory.nbytes for each in found) + scored > 4 * AT_ONCE
            return Response(await asyncio.to_thread(write) if large else write(), media_type=media_type)

    async def _answer_process(self, asked: Mapping[str, Any]) -> list[Any]:
        """Answer the question of another process of the router (`HOLDS` or `SPELLS`)."""
        texts = asked.get(HOLDS, asked.get(SPELLS))
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise BadRequest(f"{HOLDS} and {SPELLS} must be a list of texts")
        if HOLDS in asked:
            return [[*each] for each in await self._holders.look_up(texts)]
        return await self._holders.spellings(texts)

    async def require(self, scope: Scope, text: str) -> None:
        """Return if this process has most of what the text continues.

        Raises:
            Elsewhere: another process has it, and answers.
        """
        owner = best_process(await self._holders.ask(scope, [text]), 0)
        if owner is not None:
            raise Elsewhere(owner)

    async def _retrieve_anywhere(self, scope: Scope, asked: Mapping[str, Any], *, strict: bool) -> Retrieved:
        """Retrieve one text or id from the process that has it. For an unknown id, ask all other processes."""
        text, rid = asked.get("text"), asked.get("rid")
        if rid is None:
            return await self._retrieve_text(scope, text or "", strict=strict)
        if not await self._has_rid(rid):
            named = orjson.dumps({"rid": rid} if text is None else {"rid": rid, "text": text})
            for other in self._owners.others(scope):
                with suppress(NotFound):
                    return (await self._ask(other, scope, named, many=False))[0]
        return await self._retrieve_here(text, rid, strict=strict)

    async def _retrieve_text(self, scope: Scope, text: str, *, strict: bool) -> Retrieved:
        answers = await self._holders.ask(scope, [text])
        owner = best_process(answers, 0)
        if owner is None:
            found = await self._retrieve_here(text, None, strict=strict)
        elif other_processes_with(answers, 0, owner):
            (found,) = await self._ask(owner, scope, orjson.dumps({"text": text, "strict": strict}), many=False)
        else:
            raise Elsewhere(owner)
        return (await self._add_candidates(scope, answers, [found]))[0]

    async def _add_candidates(self, scope: Scope, answers: Answers, found: Sequence[Retrieved]) -> list[Retrieved]:
        """Add candidates: generations of other processes that have the same texts in other tokens."""
        asked: dict[int | None, list[int]] = {}
        for index in range(len(found)):
            for other in other_processes_with(answers, index, best_process(answers, index)):
                asked.setdefault(other, []).append(index)
        works = [self._holders.spellings_of(scope, each, [found[n].text for n in asked[each]]) for each in asked]
        others: dict[int, list[str]] = {}
        for indices, replies in zip(asked.values(), await asyncio.gather(*works), strict=True):
            for index, spellings in zip(indices, replies, strict=True):
                known = digest(found[index].tokens)
                others.setdefault(index, []).extend(rid for rid, each in spellings if each != known)
        ambiguous = sum(bool(rids) and not found[index].ambiguous for index, rids in others.items())
        self._cache.statistics.ambiguous += ambiguous
        return [replace(one, candidates=(*others.get(n, ()), *one.candidates)) for n, one in enumerate(found)]

    async def _has_rid(self, rid: str) -> bool:
        await self._recorder.archive.load_rid(rid)
        return self._cache.by_rid(rid) is not None

    async def _retrieve_many(self, scope: Scope, texts: Sequence[str], pace: Pace, *, strict: bool) -> list[Retrieved]:
        found: dict[int, Retrieved] = {}
        indices: dict[int | None, list[int]] = {}
        answers = await self._holders.ask(scope, texts)
        for index in range(len(texts)):
            indices.setdefault(best_process(answers, index), []).append(index)
        for owner, theirs in indices.items():
            if owner is None:
                each = [await self._retrieve_paced(texts[index], pace, strict=strict) for index in theirs]
            else:
                body = orjson.dumps({"texts": [texts[index] for index in theirs], "strict": strict})
                each = await self._ask(owner, scope, body, many=True)
            found.update(zip(theirs, each, strict=True))
        return await self._add_candidates(scope, answers, [found[index] for index in range(len(texts))])

    async def _ask(self, owner: int, scope: Scope, body: bytes, *, many: bool) -> list[Retrieved]:
        status, _, answer = await self._owners.ask(owner, scope, body, accept=BINARY)
        if status == 200:
            return read_safetensors_list(answer) if many else [read_safetensors(answer)]
        error = orjson.loads(answer)["error"]
        if status >= 500:
            raise Unavailable(error["message"])
        refused = NotFound(error["message"]) if status == 404 else BadRequest(error["message"])
        refused.status, refused.type = status, error["type"]
        raise refused

    async def _retrieve_paced(self, text: str, pace: Pace, *, strict: bool) -> Retrieved:
        await pace.step()
        return await self._retrieve_here(text, None, strict=strict)

    def rows(self, kind: RowKind, asked: Mapping[str, Any]) -> RowMatch:
        """Return the rows of the newest generation with exactly this text, and its `rid`.

        Raises:
            NotFound: no generation has this text.
        """
        _check_text(asked["text"])
        entries = self._cache.retrieve(asked["text"])
        if not entries:
            raise NotFound("no generation has this text from end to end")
        newest = entries[-1]
        return RowMatch(newest.rows.get(kind) or TrajectoryRows(None), len(newest), newest.rid)

    async def _retrieve_here(self, text: str | None, rid: str | None, *, strict: bool) -> Retrieved:
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
            self._rollouts.count_trained(given.match.entry, matched)
        return Retrieved(given.trajectory, text, matched, sampling_mask_missing=given.trajectory.unmasked)

    def _by_rid(self, rid: str, text: str | None) -> Retrieved:
        entry = self._cache.by_rid(rid)
        if entry is None:
            raise NotFound(f"generation {rid!r} is unknown or was evicted")
        shown = self._cache.text_of(entry)
        if text is not None and text != shown:
            raise BadRequest(f"generation {rid!r} has another text")
        self._rollouts.count_trained(entry, len(entry))
        return _of_entry(entry, shown, entry.trajectory(), (rid,))

    def _newest(self, text: str, entries: list[Entry]) -> Retrieved:
        """Return the newest entry. Older entries with other ids make the answer ambiguous."""
        newest = entries[-1]
        trajectory = newest.trajectory()
        others = [each for each in entries[:-1] if not np.array_equal(each.trajectory().tokens, trajectory.tokens)]
        self._cache.statistics.ambiguous += bool(others)
        candidates = tuple(each.rid for each in (*others, newest))
        self._rollouts.count_trained(newest, len(newest))
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
        sampling_mask_missing=trajectory.unmasked,
    )


def _write_json(found: Sequence[Retrieved], *, many: bool, with_logprobs: bool) -> bytes:
    written = [each.json_parts(with_logprobs=with_logprobs) for each in found]
    return b"".join(list_parts(written) if many else written[0])


def _check(asked: Any) -> None:
    if not isinstance(asked, Mapping):
        raise BadRequest("the request body must be a JSON object")
    if unknown := set(asked) - FIELDS:
        raise BadRequest(f"unknown field {min(unknown)!r}; known fields are {', '.join(sorted(FIELDS))}")
    for name, wanted in (("text", str), ("rid", str), ("strict", bool), ("return_logp", bool), ("texts", list)):
        if asked.get(name) is not None and not isinstance(asked[name], wanted):
            raise BadRequest(f"{name} must be a {wanted.__name__}")
    texts = asked.get("texts")
    _check_rewards(asked, texts)
    if texts is None:
        if asked.get("text") is None and asked.get("rid") is None:
            raise BadRequest("text, texts or rid is required")
        _check_text(asked.get("text"))
        return
    if asked.get("text") is not None or asked.get("rid") is not None:
        raise BadRequest("texts cannot be combined with text or rid")
    if not texts or len(texts) > MAX_TEXTS:
        raise BadRequest(f"texts must have 1 to {MAX_TEXTS} texts")
    for text in texts:
        _check_text(text if isinstance(text, str) else "")


def _check_rewards(asked: Mapping[str, Any], texts: Sequence[object] | None) -> None:
    given, rewards = asked.get("reward"), asked.get("rewards")
    if given is not None and texts is not None:
        raise BadRequest("reward is for text or rid; with texts, send rewards, one for each text")
    if rewards is not None and (texts is None or not isinstance(rewards, list) or len(rewards) != len(texts)):
        raise BadRequest("rewards must be a list with one number or null for each of texts")
    for reward in (given, *(rewards or ())):
        if reward is not None and (isinstance(reward, bool) or not isinstance(reward, (int, float))):
            raise BadRequest(f"a reward must be a number, not {type(reward).__name__}")


def _check_text(text: str | None) -> None:
    if text == "":
        raise BadRequest("a text must be a non-empty string")
