"""Another pool's logprobs of recorded tokens, as columns of samples (on-policy distillation)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from middleware_hub.auditing.asking import Asker, NotRecomputed
from middleware_hub.tokenizing.agreement import TokenizerAgreement
from miles_router.engines.models import adapter_of
from miles_router.engines.recomputing import Likeliest
from miles_router.errors import BadRequest, Conflict, UpstreamError
from miles_router.middlewares import Router
from miles_router.trajectory import TeacherScores, Trajectory

NAME = "teachers"
#: The field of requests for samples and texts.
TEACHER = "teacher"
FIELDS = frozenset({"model", "top_k"})
#: The most requests that a router process runs at once at the workers of one pool.
AT_ONCE = 16
#: The most likeliest tokens of a position; the most tokens of a request, and likeliest tokens of all positions.
MOST_TOP_K, MOST_TOKENS = 128, 1 << 21
#: The status of an engine that does not have the adapter.
BAD_REQUEST = 400
#: The most characters of an engine's refusal.
SHOWN_CHARS = 500


class TeacherRequest(NamedTuple):
    """The field `teacher` of a request: the `model_id` of a pool, or `MODEL_ID:ADAPTER`, and how many of the likeliest
    tokens to return."""

    model: str
    top_k: int = 0

    @classmethod
    def read(cls, value: object) -> TeacherRequest:
        """Return the request with this JSON.

        Raises:
            BadRequest: it is neither a name nor an object with known, valid fields.
        """
        fields = {"model": value} if isinstance(value, str) else value
        if not isinstance(fields, Mapping) or not isinstance(model := fields.get("model"), str) or not model:
            raise BadRequest(f"{TEACHER} must be a model_id, or an object with the field model")
        if unknown := fields.keys() - FIELDS:
            raise BadRequest(f"unknown field {TEACHER}.{min(unknown)}; known are {', '.join(sorted(FIELDS))}")
        top_k = fields.get("top_k", 0)
        if type(top_k) is not int or not 0 <= top_k <= MOST_TOP_K:
            raise BadRequest(f"{TEACHER}.top_k must be a whole number from 0 to {MOST_TOP_K}")
        return cls(model, top_k)


class Teachers:
    """The pools of one router as teachers. All layers share one client for each pool."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._agreement = TokenizerAgreement.of(router)
        self._askers: dict[str, Asker] = {}

    @classmethod
    def of(cls, router: Router) -> Teachers:
        """Return the router's instance, which the first call creates."""
        found: Teachers | None = getattr(router.state, NAME, None)
        if found is None:
            found = cls(router)
            setattr(router.state, NAME, found)
        return found

    async def find(self, wanted: TeacherRequest) -> Teacher:
        """Return the teacher of a request.

        Raises:
            UnknownModel: there is no pool of this name.
            Conflict: a worker of the pool has another tokenizer.
        """
        pools = self._router.fleets
        named = None if wanted.model in pools else adapter_of(wanted.model, pools.keys() - {""})
        model, adapter = named or (wanted.model, "")
        router = self._router.of_model(model)
        if differences := await self._agreement.differences(model):
            raise Conflict(f"{TEACHER} {model!r} does not read the ids of this model: {'; '.join(differences)}")
        if model not in self._askers:
            self._askers[model] = Asker(router, AT_ONCE)
        return Teacher(wanted, self._askers[model], adapter)


class Teacher:
    """A pool that scores the tokens of trajectories for one request, with its base weights or with an adapter. The
    adapters that sampled them do not matter."""

    def __init__(self, wanted: TeacherRequest, asker: Asker, adapter: str) -> None:
        self._model, self._top_k = wanted
        self._asker = asker
        self._adapter = adapter

    async def score(self, trajectories: Sequence[Trajectory]) -> list[TeacherScores]:
        """Return the scores of trajectories, in their order. If one has none, the engines are asked for no more.

        Raises:
            BadRequest: they have too many tokens for one request, one exceeds the context of the pool's engines, or the
                engines refuse the adapter.
            UpstreamError: an engine did not return the logprobs.
            RouterError: no worker can be asked.
        """
        sampled = [np.flatnonzero(each.sampled).astype(np.int32) for each in trajectories]
        lengths = [int(positions[-1]) + 1 if len(positions) else 0 for positions in sampled]
        await self._check(lengths, sum(map(len, sampled)))
        every = zip(trajectories, sampled, lengths, strict=True)
        works = [asyncio.ensure_future(self._score(*each)) for each in every]
        try:
            return await asyncio.gather(*works)
        finally:
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)

    async def _check(self, lengths: Sequence[int], sampled: int) -> None:
        for what, count in (("tokens", sum(lengths)), ("likeliest tokens", sampled * self._top_k)):
            if count > MOST_TOKENS:
                raise BadRequest(f"{count} {what} for {TEACHER} {self._model!r}; one request may have {MOST_TOKENS}")
        longest = await self._asker.longest_prompt()
        if (most := max(lengths, default=0)) > longest:
            raise BadRequest(
                f"{TEACHER} {self._model!r} reads at most {longest} tokens, and sample {lengths.index(most)} has "
                f"{most}: shorten it, or give the workers of this pool a longer context"
            )

    async def _score(self, trajectory: Trajectory, sampled: Any, length: int) -> TeacherScores:
        scores: dict[str, Any] = {"model": self._model, "weight_version": None}
        logprobs = np.zeros(len(trajectory), dtype=np.float32)
        shape = 0, self._top_k
        likeliest = Likeliest(np.zeros(shape, np.int32), np.zeros(shape, np.float32))
        if length:
            first = int(sampled[0])
            try:
                ids = trajectory.tokens[:length]
                found = await self._asker.recompute(ids, first - 1, self._adapter, top_k=self._top_k)
            except NotRecomputed as failure:
                detail = f"{failure.reason} {failure.message[:SHOWN_CHARS]}".strip()
                kind = BadRequest if self._adapter and failure.status == BAD_REQUEST else UpstreamError
                raise kind(f"{TEACHER} {self._model!r} returned no logprobs: {detail}") from None
            logprobs[sampled], scores["weight_version"] = found.logprobs[sampled - first], found.version
            if found.likeliest is not None:
                likeliest = Likeliest(*(array[sampled - first] for array in found.likeliest))
        if self._top_k:
            scores |= {"top_positions": sampled, "top_ids": likeliest.ids, "top_logprobs": likeliest.logprobs}
        return TeacherScores(logprobs=logprobs, **scores)
