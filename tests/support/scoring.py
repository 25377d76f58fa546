"""A client of a router that believes no answer: what it says was sampled is given to the engine again, and scored."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import aiohttp
import pytest

from miles_router.control import standstill
from tests.contract.client import WorkerClient
from tests.support.running_router import RunningRouter
from tests.support.stage import Stage
from tests.support.waiting import PATIENCE, until

SHORT = {"max_new_tokens": 6, "ignore_eos": True}
LONG = {"max_new_tokens": 40, "ignore_eos": True}
PROMPT = [40, 41, 42, 43, 44]


class Client(WorkerClient):
    """A client of a router before such workers."""

    def __init__(self, router: RunningRouter, session: aiohttp.ClientSession) -> None:
        super().__init__(router.url, session)
        self.router = router

    async def refused(self, path: str, /, **payload: Any) -> str:
        answer = await self.ask("POST", path, payload)
        assert (answer.status, answer.json["error"]["type"]) == (501, "unsupported_by_engine"), answer.body
        return str(answer.json["error"]["message"])

    async def is_true(self, prompt: Sequence[int], answer: Any) -> list[int]:
        """See that an answer has the ids that were sampled after this prompt, with their logprobs; gives them."""
        ids, meta = answer["output_ids"], answer["meta_info"]
        entries = meta["output_token_logprobs"]
        assert [entry[1] for entry in entries] == ids
        assert meta["completion_tokens"] == len(ids)
        if ids:
            whole = [*prompt, *ids]
            request = {"input_ids": whole, "sampling_params": {**SHORT, "max_new_tokens": 1}, "logprob_start_len": 0}
            scored = (await self.generate(**request, return_logprob=True))["meta_info"]["input_token_logprobs"]
            assert [entry[1] for entry in scored] == whole
            for (sampled, _, _), (again, _, _) in zip(entries, scored[-len(ids) :], strict=True):
                assert math.isclose(sampled, again, abs_tol=1e-3), (entries, scored)
        return list(ids)

    async def is_scored(
        self, tokens: Sequence[int], mask: Sequence[int], logprobs: Sequence[float], **more: Any
    ) -> dict[str, Any]:
        """See that the logprobs of what was sampled are what the engine says of these tokens; gives all it says."""
        request = {"input_ids": list(tokens), "sampling_params": {"max_new_tokens": 0}, "logprob_start_len": 0}
        meta: dict[str, Any] = (await self.generate(**request, **more, return_logprob=True))["meta_info"]
        for own, sampled, (score, token, _) in zip(logprobs, mask, meta["input_token_logprobs"], strict=True):
            assert not sampled or math.isclose(own, score, abs_tol=1e-3), (own, score, token)
        return meta

    async def shapes_are_true(self) -> tuple[dict[str, Any], list[Any]]:
        """See that answers of every shape are; gives that to one prompt, and the events of one that streamed."""
        ask = functools.partial(self.generate, sampling_params=SHORT, return_logprob=True)
        one: dict[str, Any] = await ask(input_ids=PROMPT)
        assert len(await self.is_true(PROMPT, one)) == 6
        for prompt, answer in zip([PROMPT, [45]], await ask(input_ids=[PROMPT, [45]]), strict=True):
            await self.is_true(prompt, answer)
        assert len(await ask(text=["One", "One two"])) == 2
        events = await self.events("/generate", input_ids=PROMPT, sampling_params=SHORT, return_logprob=True)
        assert len(await self.is_true(PROMPT, events[-1])) == 6
        listed = await self.events("/generate", input_ids=[PROMPT, [45]], sampling_params=SHORT, return_logprob=True)
        for index, prompt in enumerate([PROMPT, [45]]):
            await self.is_true(prompt, [event for event in listed if event["index"] == index][-1])
        none = await self.generate(input_ids=PROMPT, sampling_params={**SHORT, "max_new_tokens": 0})
        assert (none["output_ids"], none["text"], none["meta_info"]["completion_tokens"]) == ([], "", 0)
        return one, events

    async def is_aborted_by_its_name(self) -> None:
        """See that an abort by its client's name ends a stream with all that was sampled."""
        request = {"input_ids": PROMPT, "sampling_params": {**LONG, "max_new_tokens": 900}, "rid": "mine"}
        async with self.stream("/generate", **request, return_logprob=True) as stream:
            last = await self.cut_off(stream, "mine", lambda event: len(event["output_ids"]) >= 3)
        assert (last["meta_info"]["finish_reason"]["type"], last["meta_info"]["id"]) == ("abort", "mine")
        assert 3 <= len(await self.is_true(PROMPT, last)) < 900

    async def turns_of_text(self) -> AsyncIterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Five turns, whole and streamed, that each go on with the text of the one before: what the router says of
        each, and the record of it, whose ids are all that were sampled."""
        tokenizer = self.router.app.router.tokenizer
        text, sampled, halved = "Question: one?", 0, False
        for turn in range(5):
            request = {"text": text, "sampling_params": SHORT, "rid": f"turn {turn}"}
            answer = (await self.events("/generate", **request))[-1] if turn % 2 else await self.generate(**request)
            sampled += len(answer["output_ids"])
            found = await self.post("/retrieve_from_text", rid=f"turn {turn}")
            assert sum(found["loss_mask"]) == sampled or halved, "what was sampled before is sampled still"
            assert found["tokens"][-6:] == answer["output_ids"]
            yield answer, found
            text += f"{answer['text']}\nand {turn}?"
            # Where an answer ended within a character, its tokens are not to be known again. Engines write U+FFFD for
            # it, or nothing.
            halved = halved or "\N{REPLACEMENT CHARACTER}" in tokenizer.decode(answer["output_ids"])


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """Within it a router in this process soon gives up a flush that a paused worker refuses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(standstill, "FLUSH_PATIENCE", 0.3)
        yield


@contextlib.asynccontextmanager
async def client_of(stage: Stage, urls: Sequence[str], **settings: Any) -> AsyncIterator[Client]:
    router = await stage.router(*urls, **settings)
    await until(lambda: len(router.pool.routable) == len(urls), "all workers have answered")
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=4 * PATIENCE)) as session:
        yield Client(router, session)
