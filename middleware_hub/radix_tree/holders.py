"""Which process of a router has recorded a text. Nothing is told in advance: the process where a request lands asks all
others, and the one that has most of the text answers it.

A record is there before the last byte of its answer has gone out, so whoever can know a text finds its record.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple, TypeAlias

import orjson

from middleware_hub.radix_tree.recording import TextRecorder
from miles_router.errors import OwnerUnavailable
from miles_router.middlewares import Pace, Scope
from miles_router.middlewares.state import Elsewhere, Owners
from miles_router.trajectory.pieces import Tokens

#: Where it is asked, and the fields of the two questions: what a process has of texts, and which generations have them.
QUESTION, HOLDS, SPELLS = b"/retrieve_from_text", "holds", "spells"
DIGEST_BYTES = 8


class Held(NamedTuple):
    """What a process has of a text.

    Attributes:
        exact: whether a generation has exactly this text.
        chars: of its first characters, so many are spelled by recorded tokens, the last of which was sampled.
    """

    exact: bool = False
    chars: int = 0


#: Of one text: ids of generations, each with a digest of its tokens.
Spellings: TypeAlias = Sequence[tuple[str, str]]
#: What each process has of the texts that were asked for, this one first, which is None.
Answers: TypeAlias = list[tuple[int | None, list[Held]]]


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
        answers = await self.ask(scope, texts)
        reused = [sum(each.chars for each in held) for _, held in answers]
        most = max(reused)
        owner = answers[reused.index(most)][0]
        if owner is not None:
            raise Elsewhere(owner)
        if not most and not self._owners.is_forwarded(scope):
            self._owners.prefer(scope)

    async def ask(self, scope: Scope, texts: Sequence[str]) -> Answers:
        """Return what each process has. Raises as `require`, but Elsewhere."""
        own: tuple[int | None, list[Held]] = (None, await self.held(texts))
        if self._owners.is_forwarded(scope) or not (others := self._owners.others(scope)):
            return [own]
        question = {**scope, "method": "POST", "raw_path": QUESTION, "query_string": b""}
        told = await self._owners.answers_to(question, orjson.dumps({HOLDS: texts}))
        return [own, *((other, [Held(*each) for each in held]) for other, held in zip(others, told, strict=True))]

    async def spellings(self, texts: Sequence[str]) -> list[Spellings]:
        """Return the ids of generations of this process with exactly these texts, each with a digest of its tokens."""
        found, pace = list[Spellings](), Pace()
        for text in texts:
            await pace.step()
            entries = self._recorder.cache.retrieve(text)
            found.append([(entry.rid, digest(entry.trajectory().tokens)) for entry in entries])
        return found

    async def spellings_at(self, scope: Scope, owner: int | None, texts: Sequence[str]) -> list[Spellings]:
        """Return those of a process.

        Raises:
            OwnerUnavailable: it does not answer.
        """
        if owner is None:
            return await self.spellings(texts)
        status, _, answer = await self._owners.ask(owner, scope, orjson.dumps({SPELLS: texts}))
        if status != 200:
            raise OwnerUnavailable(f"process {owner} answers {status}")
        told: list[Spellings] = orjson.loads(answer)
        return told


def owner_of(answers: Answers, place: int) -> int | None:
    """Return the process that has a text, or most of it; None where that is the one that asked, or nobody."""
    return max(answers, key=lambda answer: answer[1][place])[0]


def others_with(answers: Answers, place: int, owner: int | None) -> list[int | None]:
    """Return who has a text exactly, beside its owner."""
    return [each for each, held in answers if each != owner and held[place].exact]


def digest(tokens: Tokens) -> str:
    """Return by what ids are known to be the same."""
    return blake2b(tokens.tobytes(), digest_size=DIGEST_BYTES).hexdigest()
