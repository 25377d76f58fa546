"""Audits of what was held before a kill, and of what other processes of a router hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

from middleware_hub.auditing.tool.command import GOOD
from miles_router.settings.config import MiddlewareSpec
from miles_router.testing import SimulatedWorker
from tests.support.audits import GENERATE_PATH, LONG, audited_at
from tests.support.cache_trial import CACHE, SHORT, checkpoint
from tests.support.http import ask
from tests.support.layers import post, recording
from tests.support.owned import name_of
from tests.support.restarts import StateDirectories
from tests.support.session_trial import CHAT, user

TEXTS = 4


async def test_texts_are_audited_after_a_kill_as_they_were_asked_for(tmp_path: Path) -> None:
    async with SimulatedWorker(tokenizer=checkpoint(), weight_version="1") as worker:
        restarts = StateDirectories(worker, tmp_path)
        texts: list[str] = []
        async with restarts.router(MiddlewareSpec(CACHE), hf_checkpoint=checkpoint()) as before:
            for params in ({}, {"frequency_penalty": 0.5}):
                body = {"text": f"Question {params}?", "sampling_params": {**SHORT, **params}}
                answer = await post(before.url, GENERATE_PATH, body)
                texts.append(body["text"] + answer.json()["text"])
            async with restarts.router(MiddlewareSpec(CACHE), hf_checkpoint=checkpoint()) as after:
                assert (await episodes(after.url)) == [], "what nobody has asked for is not in memory"
                for text in texts:
                    assert (await post(after.url, "/retrieve_from_text", {"text": text})).status == 200
                found = {}
                for each in await episodes(after.url):
                    answer = await post(after.url, f"/episodes/{quote(each['id'])}/audit", {})
                    (sample,) = answer.json()["samples"]
                    found[sample["compared"]] = sample
    tokens = SHORT["max_new_tokens"]
    assert found[0]["not_comparable"] == {"reshaped_by_frequency_penalty": tokens}
    assert {span["worker"] for span in found[tokens]["spans"]} == {worker.url}


async def test_episodes_of_all_processes_are_audited_whichever_is_asked(tmp_path: Path) -> None:
    async with recording(tmp_path, checkpoint()) as own:
        names = [name_of(index, 2, "agent-") for index in range(2)]
        for url, name in zip(own, names, strict=True):
            body: dict[str, Any] = {"model": "m", "messages": [user("Hi")], **LONG}
            assert (await post(url, CHAT, body, ("X-Session-Id", name))).status == 200
        for number in range(TEXTS):
            body = {"text": f"Question {number}: ", "sampling_params": SHORT}
            assert (await post(own[number % 2], GENERATE_PATH, body)).status == 200
        whole = await episodes(own[0])
        assert await episodes(own[1]) == whole
        assert [each["kind"] for each in whole] == ["session"] * 2 + ["text"] * TEXTS
        for url in own:
            for each in whole:
                answer = await post(url, f"/episodes/{quote(each['id'])}/audit", {"limit": 1})
                told = answer.json()
                assert (answer.status, told["id"], told["kind"]) == (200, each["id"], each["kind"])
                assert told["samples"][0]["compared"] > 0
            for path, body in (("/episodes/text@nobody/audit", {}), (f"/episodes/{names[0]}/audit", {"limit": 0})):
                assert (await post(url, path, body)).status == (400 if body else 404)
            said = await audited_at(url)
            assert (said.status, said.report["sessions"], said.report["text_rollouts"]) == (GOOD, 2, TEXTS)


async def episodes(url: str) -> list[Any]:
    """All of them, in an order of their own."""
    reply = await ask(url, "GET", "/episodes")
    assert reply.status == 200, reply.body
    return sorted(reply.json()["episodes"], key=lambda each: (each["kind"], each["id"]))
