"""What engines are asked: which text the ids have that a model samples and its tokenizer does not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from miles_router.asgi.exchange import Exchange
from miles_router.generation.questions import EngineQuestions
from miles_router.middlewares.router import Router

SPELLED = {0: "!", 1: "a", 2: "b", 5: "c"}  # 3 and 4 spell nothing by themselves, 6 and up are padding


class Asked(EngineQuestions):
    """One whose worker decodes as transformers does: what the tokenizer does not have is left out."""

    def __init__(self) -> None:
        super().__init__(cast(Router, None), Exchange("it"), [])
        self.asked: list[Any] = []

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self.asked.append(body["tokens"])
        return {"text": ["".join(SPELLED.get(token, "") for token in each) for each in body["tokens"]]}


async def texts(engine: EngineQuestions, *ids: list[int]) -> list[str]:
    return await engine.detokenize(ids, skip_special_tokens=True)


async def test_padding_is_shown_as_id_0_and_silent_tokens_as_nothing() -> None:
    assert await texts(Asked(), [1, 6, 2], [3, 5], [4], [], [9]) == ["a!b", "c", "", "", "!"]


async def test_a_silent_token_is_told_from_padding_whatever_is_asked_first() -> None:
    for first in ([3], [6], [5], [1]):
        engine = Asked()
        await texts(engine, first)
        assert await texts(engine, [3, 6]) == ["!"]


async def test_what_is_known_is_not_asked_again() -> None:
    engine = Asked()
    await texts(engine, [1, 6, 5])
    engine.asked.clear()
    await texts(engine, [3, 4, 5, 6, 99])
    assert engine.asked == [[[3, 4, 5, 0, 0]]]
