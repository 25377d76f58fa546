"""One choice of a chat answer, as a resumable generation. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from miles_router.engines.facts import Facts
from miles_router.engines.generate import GenerateRequest
from miles_router.engines.openai.chat_parts import as_generation, constraint_of, rest_request
from miles_router.generation.generation import CannotResume, ResumableGeneration

#: The seed field of the chat API.
CHAT_SEED = "seed"


class ChatGeneration(ResumableGeneration):
    """One choice of a chat answer. Its text must be fetched first, since the engine has already parsed its message.

    Args:
        fields: the agent's request.
        prompt: the prompt ids of the request to the engine.
        facts: of the engine that sampled the first part.
    """

    def __init__(self, fields: Mapping[str, Any], index: int, prompt: Sequence[int], facts: Facts) -> None:
        request = GenerateRequest.read(as_generation(fields, prompt, facts))
        super().__init__(request, index, facts=facts, defaults={}, incremental=False)
        self.fields = fields
        #: Whether the agent reads a stream, and whether the part behind the last cut can be streamed.
        self.watched = False
        self.live = False

    @cached_property
    def request(self) -> Mapping[str, Any]:
        """The request for this choice alone, in the form of `/generate`."""
        return self.client_request.single(0)

    def next_request(self) -> dict[str, Any]:
        """Return the raw chat request for the remaining part.

        Raises:
            CannotResume: the request has a constraint on the answer as a whole.
        """
        bound = constraint_of(self.fields, self.facts)
        if bound is not None:
            raise CannotResume(f"{bound} constrains the answer as a whole")
        rest = super().next_request()
        rows = {name: rest[name] for each in self.wanted_rows for name in each.request(0) if name in rest}
        # If a character or stop string may span the cut, the next part must be complete before it is shown.
        self.live = self.watched and not self.halved and not self.forming
        fields = self.fields
        if self._repeats_noise and fields.get(CHAT_SEED) is not None:
            self.seed_dropped = True
            fields = {name: value for name, value in fields.items() if name != CHAT_SEED}
        return rest_request(fields, rest["input_ids"], rest["sampling_params"], rows, stream=self.live)

    @property
    def given(self) -> int:
        """The number of input ids of the current attempt."""
        return len(self.prompt) + (len(self.answer["output_ids"]) if self.answer is not None else 0)

    def begin(self, answer: Mapping[str, Any]) -> None:
        """Add the answer of the first attempt. Raises UnreadableAnswer and CannotResume as `add`."""
        self.add(answer)
        self.held_back = True
