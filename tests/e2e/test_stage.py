"""`miles_router.check.stage`: what the author of a middleware drives it on."""

from __future__ import annotations

import pytest

from miles_router.check import stage
from miles_router.errors import ConfigError
from tests.support.plugins.working import Tagging


async def test_a_middleware_is_driven_on_generate_chat_and_streams() -> None:
    async with stage(Tagging, tag="here") as at:
        whole = await at.generate("Hello")
        assert (whole.status, whole.json()["meta_info"]["completion_tokens"]) == (200, 8)
        streamed = await at.generate("Hello", stream=True, sampling_params={"max_new_tokens": 3})
        assert [event["meta_info"]["completion_tokens"] for event in streamed.events()][-1] == 3
        assert (await at.chat()).json()["choices"][0]["message"]["role"] == "assistant"
        assert (await at.chat(stream=True)).events()[0]["object"] == "chat.completion.chunk"
        assert {reply.headers["x-tag"] for reply in (whole, streamed)} == {"here"}
        assert [exchange.json().get("text") for exchange in at.worker.log.at("/generate")] == ["Hello"] * 2
        assert (await at.ask("GET", "/router/info")).json()["in_flight"] == 0


async def test_a_class_that_cannot_be_loaded_or_an_option_that_does_not_fit_says_so() -> None:
    with pytest.raises(ConfigError, match="no module"):
        await stage("no.such.Class").__aenter__()
    with pytest.raises(ConfigError, match="did you mean 'tag'"):
        await stage(Tagging, tga="x").__aenter__()
