"""Which process of a router has recorded a text. Nothing is told in advance: the process where a request lands asks all
others, and the one that has most of the text answers it.

A record is there before the last byte of its answer has gone out, so whoever can know a text finds its record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import orjson

from middleware_hub.radix_tree.recording import TextRecorder
from miles_router.middlewares import Pace, Scope
from miles_router.middlewares.state import Elsewhere, Owners

#: Where it is asked, and the field of the question.
QUESTION, HOLDS = b"/retrieve_from_text", "holds"


class Held(NamedTuple):
    """What a process has of a text.

    Attributes:
        exact: whether a generation has exactly this text.
        chars: of its first characters, so many are spelled by recorded tokens, the last of which was sampled.
    """

    exact: bool = False
    chars: int = 0


class TextHolders:
    """Asks for one layer. With one process it finds everything here."""

    def __init__(self, recorder: TextRecorder, owners: Owners) -> None:
        self._recorder = recorder
        self._owners = owners

    async def held(self, texts: Sequence[str]) -> list[Held]:
        """Return what this process has of each text.

        Raises:
            StateError: nobody can tell.
        """
        found, pace = [], Pace()
        for text in texts:
            await pace.step()
            await self._recorder.archive.load(text)
            cache = self._recorder.cache
            found.append(Held(cache.has(text), cache.sampled_chars(text)))
        return found

    async def require(self, scope: Scope, texts: Sequence[str]) -> None:
        """Go on only in the process that has most of the prompts of a request. New ones go where their key is at home.

        Raises:
            Elsewhere: another process has more of them.
            OwnerUnavailable: a process does not say what it has.
            StateError: as `held`.
        """
        answers = await self._ask(scope, texts)
        reused = [sum(each.chars for each in held) for _, held in answers]
        most = max(reused)
        owner = answers[reused.index(most)][0]
        if owner is not None:
            raise Elsewhere(owner)
        if not most and not self._owners.is_forwarded(scope):
            self._owners.prefer(scope)

    async def owners_of(self, scope: Scope, texts: Sequence[str]) -> list[int | None]:
        """Return for each text the process that has it, or most of it; None where that is this one, or nobody. Raises
        as `require`, but Elsewhere."""
        answers = await self._ask(scope, texts)
        return [max(answers, key=lambda answer: answer[1][place])[0] for place in range(len(texts))]

    async def _ask(self, scope: Scope, texts: Sequence[str]) -> list[tuple[int | None, list[Held]]]:
        """What each process has, this one first, which is None."""
        own: tuple[int | None, list[Held]] = (None, await self.held(texts))
        if self._owners.is_forwarded(scope) or not (others := self._owners.others(scope)):
            return [own]
        question = {**scope, "method": "POST", "raw_path": QUESTION, "query_string": b""}
        told = await self._owners.answers_to(question, orjson.dumps({HOLDS: texts}))
        return [own, *((other, [Held(*each) for each in held]) for other, held in zip(others, told, strict=True))]
