"""A simulated worker that is one half of a prefill/decode pair, with the wrong facts that each half of a real pair
reports (SGLang 0.5.23)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_router.testing import Engine, PauseMode, SimulatedWorker
from miles_router.testing.worker.model.generation import Generation, GenerationRequest, Model, VersionSpan
from miles_router.testing.worker.visit import Refusal, Visit, error_object
from miles_router.testing.worker.wire.generate_output import OutputBuilder
from tests.support.simulated.pairing import INVALID, NO_MASKS, HalfGeneration, Pairing


class HalfEngine(Engine):
    """The engine of one half."""

    def __init__(self, model: Model, pairing: Pairing, **options: Any) -> None:
        super().__init__(model, **options)
        self.pairing = pairing

    def make_generation(self, request: GenerationRequest) -> Generation:
        return HalfGeneration(self.model, request)

    def pause(self, mode: PauseMode) -> None:
        super().pause(mode)
        for generation in self.running.values() if mode is PauseMode.RETRACT else ():
            assert isinstance(generation, HalfGeneration)
            generation.recomputed = len(generation.output_ids)

    async def outputs(self, generation: Generation) -> AsyncIterator[None]:
        """Run a generation on this half.

        Raises:
            Refusal: it failed and is not streamed. A stream reports the failure in its last event.
        """
        assert isinstance(generation, HalfGeneration)
        async for _ in self._parts(generation):
            finish = generation.finish_reason or {}
            status = finish.get("status_code")
            if status is not None and not generation.request.stream:
                raise Refusal(status, error_object(finish["message"], status, str(status)))
            yield

    async def _parts(self, generation: HalfGeneration) -> AsyncIterator[None]:
        if generation.request.return_sampling_mask and not self.pairing.masks:
            generation.fail(NO_MASKS, INVALID)
            yield
            return
        if self.pairing.mode == "prefill":
            async for _ in self.pairing.prefill(self, generation):
                yield
            return
        async for _ in self.pairing.begin_decode(self, generation):
            yield
        async for _ in super().outputs(generation):
            yield


class DecodeOutputBuilder(OutputBuilder):
    """A builder of a decode half's answers: data that only its prefill half has is wrong or missing."""

    def logprob_fields(self, generation: Generation) -> dict[str, Any]:
        fields = super().logprob_fields(generation)
        theirs: dict[str, Any] = {name: [] for name in fields if name.startswith("input_")}
        first = {name: [None, *fields[name][1:]] for name in ("output_token_ids_logprobs",) if fields.get(name)}
        return {**fields, **theirs, **first}

    def version_spans(self, generation: Generation) -> list[VersionSpan]:
        """Return the spans, which SGLang loses at a retraction."""
        if generation.retractions:
            return [VersionSpan(self._engine.weight_version, 0, len(generation.output_ids))]
        return super().version_spans(generation)

    def _add_rows(self, meta: dict[str, Any], generation: Generation) -> None:
        if len(generation.output_ids) > 1:  # else the decode half computed nothing itself
            super()._add_rows(meta, generation)

    def encode_rows(self, rows: NDArray[np.int32], generation: Generation, start: int) -> str:
        """Encode rows; those of positions that the prefill half computed are whatever the memory contains."""
        assert isinstance(generation, HalfGeneration)
        theirs = max(0, generation.prompt_tokens + generation.recomputed - start)
        return super().encode_rows(np.concatenate((np.roll(rows[:theirs], 1), rows[theirs:])), generation, start)


class HalfVisit(Visit):
    """A request to one half."""

    def accept(self, samples: list[GenerationRequest], copies: int) -> list[GenerationRequest]:
        assert isinstance(self.engine, HalfEngine)
        return self.engine.pairing.assign(self.engine, self.json(), samples, copies)

    def output_builder(self) -> OutputBuilder:
        decodes = self.settings.disaggregation_mode == "decode"
        return (DecodeOutputBuilder if decodes else OutputBuilder)(self.engine, self.settings)


class HalfWorker(SimulatedWorker):
    """One half of a pair; the options are those of `SimulatedWorker`."""

    visit_type = HalfVisit

    def __init__(self, pairing: Pairing, **options: Any) -> None:
        self.pairing = pairing
        super().__init__(**options)
        self.settings = replace(self.settings, disaggregation_mode=pairing.mode)

    def make_engine(self, model: Model, **options: Any) -> Engine:
        return HalfEngine(model, self.pairing, **options)

    @property
    def registration(self) -> dict[str, str]:
        return {**super().registration, **self.pairing.registration}

    async def restart(self) -> None:
        await self.pairing.start(self.engine)
        await super().restart()

    async def _abort_connections(self) -> None:
        await self.pairing.stop()
        await super()._abort_connections()
