"""One choice of a chat answer, as a generation that is sampled in parts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from miles_router.engines.facts import Facts
from miles_router.engines.generate import GenerateRequest
from miles_router.engines.openai.chat_parts import as_generation, constraint_of, rest_request
from miles_router.generation.generation import CannotResume, ResumableGeneration

#: The field of a seed in chat.
CHAT_SEED = "seed"


class ChatGeneration(ResumableGeneration):
    """One choice. Its text is known once it was asked for: what the engine said of it was parsed.

    Args:
        fields: the agent's request.
        prompt: the ids that it was given.
        facts: of the engine that sampled the first part.
    """

    def __init__(self, fields: Mapping[str, Any], index: int, prompt: Sequence[int], facts: Facts) -> None:
        request = GenerateRequest.read(as_generation(fields, prompt, facts))
        super().__init__(request, index, facts=facts, defaults={}, incremental=False)
        self.fields = fields
        #: Whether somebody reads it as it comes, and whether what follows the last cut can be.
        self.watched = False
        self.live = False

    @cached_property
    def request(self) -> Mapping[str, Any]:
        """The request for this choice alone, in the form of `/generate`."""
        return self.client_request.single(0)

    def next_request(self) -> dict[str, Any]:
        """The request for what is left, raw.

        Raises:
            CannotResume: it has a form that only a whole answer has.
        """
        bound = constraint_of(self.fields, self.facts)
        if bound is not None:
            raise CannotResume(f"{bound} binds the whole answer")
        rest = super().next_request()
        rows = {name: rest[name] for each in self.wanted_rows for name in each.request(0) if name in rest}
        # Where a character or a stop string may stand across the cut, what follows is looked at as a whole.
        self.live = self.watched and not self.halved and not self.forming
        fields = self.fields
        if self._repeats_noise and fields.get(CHAT_SEED) is not None:
            self.seed_dropped = True
            fields = {name: value for name, value in fields.items() if name != CHAT_SEED}
        return rest_request(fields, rest["input_ids"], rest["sampling_params"], rows, stream=self.live)

    @property
    def given(self) -> int:
        """Ids that the part which is sampled now was given."""
        return len(self.prompt) + (len(self.answer["output_ids"]) if self.answer is not None else 0)

    def begin(self, answer: Mapping[str, Any]) -> None:
        """Take the first part. Raises UnreadableAnswer, CannotResume as `add`."""
        self.add(answer)
        self.held_back = True
