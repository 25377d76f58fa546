"""Find the process of a router that has recorded a text.

Processes do not announce their texts. The process where a request lands asks all others, and the process that has most
of the text answers the request. A generation is recorded before the last byte of its answer is sent, so a client that
knows the text always finds its record.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple, TypeAlias

import orjson

from middleware_hub.radix_tree.recording import TextRecorder
from miles_router.errors import Unavailable
from miles_router.middlewares import Pace, Scope
from miles_router.middlewares.state import Elsewhere, Owners
from miles_router.trajectory.pieces import Tokens

#: The path of the questions, and their fields: how much a process has of each text, and which generations spell it.
QUESTION, HOLDS, SPELLS = b"/retrieve_from_text", "holds", "spells"
DIGEST_BYTES = 8


class Held(NamedTuple):
    """One process's record of a text.

    Attributes:
        exact: whether a generation has exactly this text.
        chars: the number of first characters that recorded tokens spell, up to a sampled token.
    """

    exact: bool = False
    chars: int = 0


#: For one text: ids of generations, each with a digest of its tokens.
Spellings: TypeAlias = Sequence[tuple[str, str]]
#: For each process, its index and its records of the texts. The asking process comes first, with the index None.
Answers: TypeAlias = list[tuple[int | None, list[Held]]]


class TextHolders:
    """The look-up of texts in all processes. A router with one process looks only into its own cache."""

    def __init__(self, recorder: TextRecorder, owners: Owners) -> None:
        self._recorder = recorder
        self._owners = owners

    async def look_up(self, texts: Sequence[str]) -> list[Held]:
        """Return this process's record of each text, in the order of `texts`.

        Raises:
            StateError: the store cannot be read.
        """
        found, pace = [], Pace()
        for text in texts:
            await pace.step()
            await self._recorder.archive.load(text)
            cache = self._recorder.cache
            found.append(Held(cache.has(text), cache.sampled_chars(text)))
        return found

    async def require(self, scope: Scope, texts: Sequence[str]) -> None:
        """Return if this process has most of a request's prompts. New prompts belong to the process of the request's
        key.

        Raises:
            Elsewhere: another process has more of the prompts.
            Unavailable: another process did not answer.
            StateError: the store cannot be read.
        """
        answers = await self.ask(scope, texts)
        reused = [sum(each.chars for each in held) for _, held in answers]
        most = max(reused)
        owner = answers[reused.index(most)][0]
        if owner is not None:
            raise Elsewhere(owner)
        if not most and not self._owners.is_forwarded(scope):
            self._owners.prefer_home(scope)

    async def ask(self, scope: Scope, texts: Sequence[str]) -> Answers:
        """Return each process's records of the texts. Raises the same errors as `require`, except Elsewhere."""
        own: tuple[int | None, list[Held]] = (None, await self.look_up(texts))
        if self._owners.is_forwarded(scope) or not (others := self._owners.others(scope)):
            return [own]
        question = {**scope, "method": "POST", "raw_path": QUESTION, "query_string": b""}
        replies = await self._owners.answers_to(question, orjson.dumps({HOLDS: texts}))
        return [own, *((other, [Held(*each) for each in held]) for other, held in zip(others, replies, strict=True))]

    async def spellings(self, texts: Sequence[str]) -> list[Spellings]:
        """Return this process's generations with exactly these texts: ids, each with a digest of its tokens."""
        found, pace = list[Spellings](), Pace()
        for text in texts:
            await pace.step()
            entries = self._recorder.cache.retrieve(text)
            found.append([(entry.rid, digest(entry.trajectory().tokens)) for entry in entries])
        return found

    async def spellings_of(self, scope: Scope, owner: int | None, texts: Sequence[str]) -> list[Spellings]:
        """Return the same as `spellings`, from the process `owner` (None: this one).

        Raises:
            Unavailable: the process did not answer.
        """
        if owner is None:
            return await self.spellings(texts)
        status, _, answer = await self._owners.ask(owner, scope, orjson.dumps({SPELLS: texts}))
        if status != 200:
            raise Unavailable(f"process {owner} of the router answered {status} about recorded texts")
        replies: list[Spellings] = orjson.loads(answer)
        return replies


def best_process(answers: Answers, index: int) -> int | None:
    """Return the process that has most of the text at index `index`; None for the asking process, also by default."""
    return max(answers, key=lambda answer: answer[1][index])[0]


def other_processes_with(answers: Answers, index: int, owner: int | None) -> list[int | None]:
    """Return the processes besides `owner` that have exactly this text."""
    return [each for each, held in answers if each != owner and held[index].exact]


def digest(tokens: Tokens) -> str:
    """Return a digest by which processes compare token ids."""
    return blake2b(tokens.tobytes(), digest_size=DIGEST_BYTES).hexdigest()
