"""Episodes, their audits and the run of a router of two processes: the whole, whichever process is asked, and what they
ask of each other brings the key of its client."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from middleware_hub.auditing.tool.command import GOOD
from miles_router.testing import SimulatedWorker
from tests.support.audits import LONG, audited_at
from tests.support.cache_trial import CACHE, checkpoint
from tests.support.forks import fork_router
from tests.support.http import ask
from tests.support.layers import post, recording, written
from tests.support.owned import name_of
from tests.support.running_router import router_process
from tests.support.session_trial import CHAT, SESSIONS, user

NAMES = [name_of(index, 2, f"agent-{place}-") for place in range(2) for index in range(2)]
TEXTS = 4


async def get(url: str, path: str, status: int = 200) -> Any:
    reply = await ask(url, "GET", path)
    assert reply.status == status, reply.body
    return reply.json()


async def all_episodes(url: str, query: str) -> list[Any]:
    """Page by page."""
    found, after = [], ""
    while True:
        page = await get(url, f"/router/episodes?{query}{after}")
        found += page["episodes"]
        if page["next"] is None:
            return found
        after = f"&after={quote(page['next'])}"


async def test_episodes_and_the_run_are_those_of_all_processes_whichever_is_asked(tmp_path: Path) -> None:
    async with recording(tmp_path, checkpoint()) as own:
        for place, name in enumerate(NAMES):
            body = {"model": "m", "messages": [user("Hi")], **LONG}
            assert (await post(own[place // 2], CHAT, body, ("X-Session-Id", name))).status == 200
        for number in range(TEXTS):
            asked = {"text": f"Question {number}: ", "sampling_params": {"max_new_tokens": 4}}
            assert (await post(own[number % 2], "/generate", asked)).status == 200

        whole = await all_episodes(own[0], "limit=50")
        assert [each["id"] for each in whole if each["kind"] == "session"] == NAMES[::-1]
        assert len(whole) == len(NAMES) + TEXTS
        for url in own:
            for query in ("limit=1", "limit=3", "limit=500"):
                assert await all_episodes(url, query) == whole
            assert await all_episodes(url, "limit=2&kind=text") == [each for each in whole if each["kind"] == "text"]
            for each in whole:
                detail = await get(url, f"/router/episodes/{quote(each['id'])}")
                assert (detail["id"], detail["turns_total"]) == (each["id"], 1)
                tokens = await get(url, f"/router/episodes/{quote(each['id'])}/tokens")
                assert len(tokens["tokens"]) == each["tokens"]["all"]
            for path in ("/episodes", "/sessions", "/router/episodes", f"/router/episodes/{NAMES[0]}", "/router/run"):
                assert (await ask(url, "HEAD", path)).status == 200, path
            await get(url, "/router/episodes/nobody", 404)
            for each in whole:
                answer = await post(url, f"/episodes/{quote(each['id'])}/audit", {"limit": 1})
                told = answer.json()
                assert (answer.status, told["id"], told["kind"]) == (200, each["id"], each["kind"])
                assert told["samples"][0]["compared"] > 0
            for path, body in (("/episodes/text@nobody/audit", {}), (f"/episodes/{NAMES[0]}/audit", {"limit": 0})):
                assert (await post(url, path, body)).status == (400 if body else 404)
            said = await audited_at(url)
            assert (said.status, said.report["sessions"], said.report["text_rollouts"]) == (GOOD, len(NAMES), TEXTS)
            run = await get(url, "/router/run")
            for counts in (run["intervals"], run["versions"]):
                assert sum(each["turns"] for each in counts) == len(NAMES) + TEXTS
            (version,) = run["versions"]
            assert version["sampled"] == sum(each["tokens"]["sampled"] for each in whole)


async def test_equal_texts_read_by_rid_at_any_process_are_each_counted(tmp_path: Path) -> None:
    async with recording(tmp_path, checkpoint()) as own:
        asked = {"text": "Question: ", "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}}
        answers = [(await post(own[number % 2], "/generate", asked)).json() for number in range(TEXTS)]
        for number, answer in enumerate(answers):
            body = {"rid": answer["meta_info"]["id"]}
            assert (await post(own[number // 2], "/retrieve_from_text", body)).status == 200
        (version,) = (await get(own[0], "/router/run"))["versions"]
        assert (version["sampled"], version["trained"]) == (16, 16)


async def test_what_processes_ask_of_each_other_brings_the_client_s_key(tmp_path: Path) -> None:
    layers: Any = ((SESSIONS, {}), (CACHE, {}))
    config = written(tmp_path, layers, hf_checkpoint=checkpoint(), api_key="ours", max_text_chars=200, processes=2)
    given, start = ("--config", str(config)), partial(fork_router, tokenizer=checkpoint())
    async with (
        SimulatedWorker(tokenizer=checkpoint()) as worker,
        router_process(*given, "--worker-urls", worker.url, start=start) as router,
    ):
        key = ("Authorization", "Bearer ours")
        for index in range(2):
            assert (await post(router.url, "/sessions", {"session_id": name_of(index, 2, "s")}, key)).status == 200
        texts = [f"{number}: Hi" for number in range(4)]
        for text in texts:
            assert (await post(router.url, "/generate", {"text": text, "rid": text[0]}, key)).status == 200
        for _ in range(4):  # so that each process is asked
            found = await ask(router.url, "GET", "/sessions", [key])
            assert len(found.json()["sessions"]) == 2
            for text in texts:
                assert (await post(router.url, "/retrieve_from_text", {"rid": text[0]}, key)).status == 200
            found = await post(router.url, "/retrieve_from_text", {"texts": [*texts, texts[0] + "a" * 200]}, key)
            assert (found.status, found.error_type) == (413, "invalid_request")
        assert (await ask(router.url, "GET", "/sessions")).status == 401
