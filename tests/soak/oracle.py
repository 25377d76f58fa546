"""What the simulated model must have sampled, from the tokens alone.

A logprob of the simulated model belongs to a token behind all tokens before it, and a row of experts to a token at its
place (`miles_router.testing.worker.model.sampling` and `moe`). So a trajectory that holds one wrong token, or one in a
wrong place, has a logprob or a row that does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from miles_router.testing.worker.model.generation import Model
from miles_router.testing.worker.model.hf_vocabulary import DirectoryTokenizer
from miles_router.testing.worker.model.sampling import context_hash
from tests.support.cache_trial import checkpoint
from tests.support.experts_trial import truth

CONTEXT, STOP_PROBABILITY = 32768, 1 / 256


class Oracle:
    """Holds trajectories against the model; `positions` and `rows` say how much was held, all of it exact."""

    def __init__(self) -> None:
        self.vocabulary = DirectoryTokenizer(checkpoint())
        self._sampler = Model.seeded(self.vocabulary, 0, STOP_PROBABILITY, CONTEXT).sampler
        self.positions = 0
        self.rows = 0

    def check(self, tokens: Sequence[int], mask: Sequence[int], logprobs: Sequence[float]) -> None:
        """Every token of the loss was sampled behind those before it, with its logprob; all others have none.

        Raises:
            AssertionError: one was not.
        """
        assert len(tokens) == len(mask) == len(logprobs), (len(tokens), len(mask), len(logprobs))
        context = 0
        for place, (token, trained, logprob) in enumerate(zip(tokens, mask, logprobs, strict=True)):
            if trained:
                expected = self._sampler.logprob(context, token)
                assert np.float32(expected) == np.float32(logprob), f"token {token} at {place}: {logprob}, {expected}"
                self.positions += 1
            context = context_hash((token,), context)

    def logprob(self, before: Sequence[int], token: int) -> float:
        """Of a token behind others."""
        return self._sampler.logprob(context_hash(before), token)

    def answer(self, given: Sequence[int], answer: Mapping[str, Any]) -> None:
        """An answer of `/generate` with logprobs, behind the ids that the engine was given."""
        meta, ids = answer["meta_info"], answer["output_ids"]
        entries = meta["output_token_logprobs"]
        assert [entry[1] for entry in entries] == ids, "logprobs of other tokens"
        assert meta["completion_tokens"] == len(ids)
        logprobs = [0.0] * len(given) + [entry[0] for entry in entries]
        self.check([*given, *ids], [0] * len(given) + [1] * len(ids), logprobs)
        spans = meta.get("weight_versions") or []
        assert not spans or [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])], spans
        assert not spans or spans[-1]["end"] == len(ids), spans

    def experts(self, tokens: Sequence[int], rows: Any) -> None:
        """The rows are those of these tokens."""
        expected = truth(tokens)
        assert rows.shape == expected.shape, (rows.shape, expected.shape)
        assert np.array_equal(rows, expected), "experts of other tokens"
        self.rows += len(expected)

    def sample(self, sample: Mapping[str, Any], experts: npt.NDArray[Any]) -> None:
        """A sample of a session, and its rows."""
        self.check(sample["tokens"], sample["loss_mask"], sample["logprobs"])
        assert "routed_experts_missing" not in sample["metadata"], sample["metadata"]
        self.experts(sample["tokens"], experts)
