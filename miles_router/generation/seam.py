"""Repairs at a cut: a split character, a stop string that spans the cut, and an end that the engine did not report.

A resumed engine gets the earlier tokens as its prompt, so it detects none of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles_router.engines.answers import UNFINISHED
from miles_router.engines.models import ADAPTER
from miles_router.engines.rows import RowFields
from miles_router.generation.continuation import learn_prompt
from miles_router.generation.generation import CannotResume, ResumableGeneration
from miles_router.generation.joining import (
    AT_ONCE,
    find_end,
    find_stop_across,
    join_base64,
    stop_may_form,
    truncate,
)
from miles_router.generation.questions import EngineQuestions

#: Tokens on either side of a cut that are decoded to restore the character that it may have split.
WINDOW = 16
HALVED = 3  # maximum bytes of a split character before the cut; each shows as one U+FFFD


class Seam:
    """The boundary between the earlier attempts of a generation and the current one. Its methods raise CannotResume or
    UnreadableAnswer if a fact is needed that no engine reports."""

    def __init__(self, generation: ResumableGeneration, questions: EngineQuestions) -> None:
        self._generation = generation
        self._questions = questions

    async def end_at_cut(self) -> bool:
        """End the generation if its last token before the cut already ends it; return whether it does."""
        generation = self._generation
        answer, params = generation.answer, generation.params
        if answer is None or not answer["output_ids"]:
            return False
        ids, tail = answer["output_ids"], ""
        if generation.stops:
            tail = (await self._questions.spell([ids[-self._max_stop_tokens :]]))[0]
            stable = tail.rstrip(UNFINISHED)
            generation.forming = stop_may_form(stable, len(stable), generation.stops, halved=stable != tail)
        ends: set[int] = set()
        if not params.get("ignore_eos"):
            await self._questions.is_end(ids[-1])
            ends = {*self._questions.end_tokens, *(params.get("stop_token_ids") or ())}
        found = find_end(ids, tail, generation.stops, ends, generation.budget)
        if found is None:
            return False
        for fields in generation.lost_rows:
            await learn_prompt(generation, self._questions)
            answer = await self._with_rows(answer, fields, ids)
        generation.end(await self._end_after(answer, *found))
        return True

    async def restore_held_back(self) -> None:
        """Restore text that a lost worker had held back: incomplete characters and partial stop strings."""
        generation = self._generation
        answer = generation.answer
        if answer is None or not generation.held_back or not answer["output_ids"]:
            return
        await learn_prompt(generation, self._questions)
        before = generation.prompt[-WINDOW:]
        half, more = await self._detokenize([before, [*before, *answer["output_ids"]]])
        text = more[len(half) :]
        if not text.startswith(answer["text"].rstrip(UNFINISHED)):
            raise CannotResume("the worker's tokenizer returns another text than the worker had streamed")
        generation.answer = {**answer, "text": text}
        generation.halved, generation.held_back = text.endswith(UNFINISHED), False

    async def mend(self, *, finished: bool) -> tuple[dict[str, Any], bool]:
        """Return the joined answer so far, and whether a stop string across the cut ends it. `finished`: the worker has
        ended this attempt."""
        generation = self._generation
        assert generation.answer is not None
        if generation.halved:
            await self._complete_character(finished=finished)
        joined = generation.so_far()
        assert joined is not None
        found = await self._find_stop(joined) if generation.forming else None
        if found is None:
            return joined, False
        tokens, finish = found
        if finished:
            return await self._end_after(joined, tokens, finish), True
        # The rows come from earlier attempts only. A worker sends the rest with its end, which does not come here.
        wanted = generation.wanted_rows
        before = {fields: joined["meta_info"].pop(fields.rows.name, None) for fields in wanted}
        ended = await self._end_after(joined, tokens, finish)
        for fields, rows in before.items():
            ended["meta_info"][fields.rows.name] = rows
            ended = await self._with_rows(ended, fields, joined["output_ids"][:tokens])
        return ended, True

    async def _end_after(self, answer: Mapping[str, Any], tokens: int, finish: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer truncated as an engine would: without the stop string (unless `no_stop_trim`) or stop token
        in its text."""
        request = self._generation.request
        matched, kept = finish.get("matched"), self._generation.params.get("no_stop_trim")
        if isinstance(matched, str) and matched in answer["text"]:
            text = answer["text"][: answer["text"].index(matched) + (len(matched) if kept else 0)]
        else:
            text = await self._text_of_prefix(answer, tokens - (isinstance(matched, int) and not kept))
        return truncate(answer, tokens, text, finish, request=request)

    async def _text_of_prefix(self, answer: Mapping[str, Any], tokens: int) -> str:
        """Return the text without the part that the ids behind the first `tokens` spell."""
        text: str = answer["text"]
        ids = answer["output_ids"]
        if tokens == len(ids) or not text:
            return text
        await learn_prompt(self._generation, self._questions)
        before = [*self._generation.prompt, *ids[:tokens]][-WINDOW:]
        half, more = await self._detokenize([before, [*before, *ids[tokens:]]])
        return text.removesuffix(more[len(half) :])

    async def _find_stop(self, joined: Mapping[str, Any]) -> tuple[int, dict[str, Any]] | None:
        """Return the number of tokens that complete a stop string across the cut, and the finish reason; None without
        one."""
        generation = self._generation
        assert generation.answer is not None
        begin, reach = len(generation.answer["output_ids"]), self._max_stop_tokens
        before, new = joined["output_ids"][:begin][-reach:], joined["output_ids"][begin : begin + reach]
        half, whole = await self._questions.spell([before, [*before, *new]])
        boundary = len(half.rstrip(UNFINISHED))
        halved = boundary < len(half)
        found = find_stop_across(whole, boundary, generation.stops, halved=halved)
        if found is None:
            generation.forming = stop_may_form(whole.rstrip(UNFINISHED), boundary, generation.stops, halved=halved)
            return None
        stop = found[1]
        texts = await self._questions.spell([[*before, *new[:count]] for count in range(1, len(new) + 1)])
        counts = (n for n, text in enumerate(texts, 1) if find_stop_across(text, boundary, [stop], halved=halved))
        return begin + next(counts, len(new)), {"type": "stop", "matched": stop}

    async def _complete_character(self, *, finished: bool) -> None:
        """Restore the last character before the cut, which the cut may have split, once its other bytes have
        arrived."""
        generation = self._generation
        head, current = generation.answer, generation.current
        if head is None or current is None or not head["text"].endswith(UNFINISHED) or not generation.prompt:
            return
        before = [*generation.prompt, *head["output_ids"]][-WINDOW:]
        half, more = await self._detokenize([before, [*before, *current["output_ids"][:WINDOW]]])
        if not finished and len(more) <= len(half) and more.endswith(UNFINISHED):
            return
        size = min(HALVED, len(head["text"]) - len(head["text"].rstrip(UNFINISHED)))
        generation.answer = {**head, "text": head["text"][:-size] + more[len(half) - size : len(half)]}
        generation.halved = False

    async def _with_rows(self, answer: dict[str, Any], fields: RowFields, sampled: Sequence[int]) -> dict[str, Any]:
        """Return the answer with its missing rows. An engine that has no rows leaves it without any."""
        generation, name = self._generation, fields.rows.name
        adapter = generation.request.get(ADAPTER) or self._questions.exchange.adapter
        sequence, start = [*generation.prompt, *sampled], generation.rows_from[fields.kind]
        rows = await self._questions.rows(fields, sequence, start, adapter)
        meta = {**answer["meta_info"], name: join_base64(answer["meta_info"].get(name) or "", rows)}
        if not meta[name]:
            del meta[name]
        return {**answer, "meta_info": meta}

    @property
    def _max_stop_tokens(self) -> int:
        """The maximum number of tokens that spell a stop string: one per byte, and some that spell nothing."""
        return 4 * max(map(len, self._generation.stops), default=0) + AT_ONCE

    async def _detokenize(self, ids: Sequence[Sequence[int]]) -> list[str]:
        skip = self._generation.params.get("skip_special_tokens") is not False
        return await self._questions.detokenize(ids, skip_special_tokens=skip)
