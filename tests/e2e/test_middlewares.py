"""The middleware contract over real sockets: what a class may rely on, seen from both ends of the wire, and
from `miles_router.check.stage`, on which its author drives it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from miles_router.check import stage
from miles_router.errors import ConfigError
from miles_router.settings.config import MiddlewareSpec
from tests.support.http import CutReply
from tests.support.metrics import metrics, total
from tests.support.plugins.working import Tagging
from tests.support.scripted_worker import CLOSE, reply, script
from tests.support.stage import Stage, staged

WORKING = "tests.support.plugins.working"


def stack(*layers: str | tuple[str, dict[str, Any]]) -> tuple[MiddlewareSpec, ...]:
    """Specs of classes in the module of working plugins, first = outermost."""
    named = [(layer, {}) if isinstance(layer, str) else layer for layer in layers]
    return tuple(MiddlewareSpec(f"{WORKING}.{name}", options) for name, options in named)


async def test_the_first_listed_is_outermost_and_gets_its_options(stage: Stage) -> None:
    worker = await stage.worker()
    layers = stack(("Tagging", {"tag": "outer"}), ("Plain", {"mode": "off"}))
    router = await stage.router(worker, middlewares=layers)
    answer = await router.ask("POST", "/generate", body=b"{}")
    assert worker.requests[0].values("x-tag") == [b"outer", b"plain"]
    assert answer.values("x-tag") == [b"outer"]
    info = (await router.ask("GET", "/router/info")).json()
    assert [each["name"] for each in info["middlewares"]] == ["tagging", "plain", "dashboard_middleware"]
    assert info["middlewares"][0] == {"name": "tagging", "path": f"{WORKING}.Tagging", "options": {"tag": "outer"}}
    assert info["statistics"]["tagging"] == {"tags": {"outer": 1}, "length": 5}
    text = await metrics(router.url)
    assert total(text, "tagging_requests_total") == total(text, "tagging_tags_total", tag="outer") == 1


async def test_a_class_answers_its_own_route_and_leaves_the_rest_to_the_workers(stage: Stage) -> None:
    worker, router = await stage.worker_and_router(middlewares=stack(("Tagging", {"tag": "t", "times": 3})))
    assert (await router.ask("GET", "/tagging/x")).json() == {"tag": "ttt", "name": "x"}
    refused = await router.ask("POST", "/tagging/x")
    assert (refused.status, refused.error_type) == (405, "invalid_request")
    assert not worker.requests
    assert (await router.ask("GET", "/tagging/x/y")).status == 200
    assert worker.requests[0].path == "/tagging/x/y"
    keys = {"api_key": "clients", "admin_api_key": "admin"}
    router = await stage.router(worker, middlewares=stack("Observing"), **keys)
    for target, statuses in (("/observed", [200, 200, 200]), ("/router/some/o", [401, 401, 200])):
        bearers = [[("Authorization", f"Bearer {key}")] for key in ("none", "clients", "admin")]
        assert [(await router.ask("GET", target, each)).status for each in bearers] == statuses
        assert (await router.ask("POST", target, bearers[-1])).status == 405
    assert len(worker.requests) == 1


async def test_lifespans_are_entered_outermost_first_and_left_in_reverse() -> None:
    async with staged() as stage:
        layers = (*stack(("Tagging", {"tag": "o"})), *stack("Lasting"))
        router = await stage.router(await stage.worker(), middlewares=layers)
        log = router.app.router.state.lifespans
        assert log == ["enter o", "enter lasting"]
    assert log == ["enter o", "enter lasting", "leave lasting", "leave o"]


@pytest.mark.alone("it looks inside")
async def test_a_starlette_base_middleware_of_another_router_runs_unchanged(stage: Stage) -> None:
    worker, router = await stage.worker_and_router(middlewares=stack("Legacy"), hf_checkpoint="/models/some")
    answer = await router.ask("POST", "/generate", body=b'{"text": "x"}')
    assert answer.value("x-legacy") == b"13 bytes"
    assert worker.requests[0].body == b'{"text": "x"}'
    legacy = vars(router.app.router)["radix_tree"]
    assert legacy.checkpoint == "/models/some"


async def test_a_rewritten_body_reaches_the_worker_once_with_its_length(stage: Stage) -> None:
    worker, router = await stage.worker_and_router(middlewares=stack("Rewriting", "Reading"))
    await router.ask("POST", "/generate", body=b'{"text": "a"}')
    (seen,) = worker.requests
    assert json.loads(seen.body) == {"text": "a", "return_logprob": True}
    assert seen.values("content-length") == [str(len(seen.body)).encode()]


async def test_layers_share_one_parse_of_a_body_until_one_changes_it(stage: Stage) -> None:
    for layers, same in ((["Reading"] * 3, [b"True"] * 3), (["Reading", "Rewriting", "Reading"], [b"False"] * 2)):
        router = await stage.router(await stage.worker(), middlewares=stack(*layers))
        answer = await router.ask("POST", "/generate", body=b'{"text": "a"}')
        assert answer.values("x-one-parse") == same
        refused = await router.ask("POST", "/generate", body=b'{"text": ')
        assert (refused.status, refused.error_type) == (400, "invalid_request")


@pytest.mark.alone("another process decides a moment later that a worker is out")
async def test_a_class_retries_through_the_inner_app_after_a_worker_died(stage: Stage) -> None:
    dying, living = await stage.worker(), await stage.worker()
    dying.always(script(CLOSE))
    living.always(script(reply(b'{"alive": true}')))
    router = await stage.router(dying, living, middlewares=stack("Retrying"), max_retries=0)
    answers = [await router.ask("POST", "/generate", body=b'{"n": 1}') for _ in range(2)]
    assert [answer.json() for answer in answers] == [{"alive": True}] * 2
    assert {request.body for request in (*dying.requests, *living.requests)} == {b'{"n": 1}'}
    assert dying.requests, "the first choice must have been the one that died"


async def test_a_typed_error_passes_every_layer_and_is_rendered_once(stage: Stage) -> None:
    dying = await stage.worker()
    dying.always(script(CLOSE))
    router = await stage.router(dying, middlewares=stack("Retrying", "Reading"))
    answer = await router.ask("POST", "/generate", body=b"{}")
    assert (answer.status, answer.error_type) == (502, "upstream_unreachable")
    # Twice by the middleware; the connection kept from the first probe may have been tried before a new one.
    assert 2 <= len(dying.requests) <= 3


async def test_forward_leases_a_worker_for_a_request_of_the_middlewares_own(stage: Stage) -> None:
    worker = await stage.worker()
    worker.always(script(reply(b'{"from": "worker"}', 201)))
    router = await stage.router(worker, middlewares=stack("Asking"))
    answer = (await router.ask("POST", "/ask")).json()
    assert answer == {"status": 201, "answer": '{"from": "worker"}', "in_flight": 1}
    (seen,) = worker.requests
    assert (seen.target, seen.body) == (b"/generate?own=1", b'{"own": true}')
    assert len(seen.values("x-request-id")) == 1


#: A defect, control flow that gets out, no answer, and a header that would split the reply (CWE-113); what is logged.
DEFECTS = {"Failing": "internal_error", "Leaking": "CannotGoOn", "Silent": "no_reply", "Splitting": "control character"}


@pytest.mark.parametrize(("layer", "logged"), DEFECTS.items())
async def test_a_defect_in_a_middleware_is_a_500_that_tells_nothing(stage: Stage, layer: str, logged: str) -> None:
    router = await stage.router(await stage.worker(), middlewares=stack(layer))
    answer = await router.ask("POST", "/generate", body=b"a\r\nset-cookie: b=c")
    assert (answer.status, answer.error_type, answer.values("set-cookie")) == (500, "internal_error", [])
    assert b"secret" not in answer.body
    await stage.provoked(logged)


async def test_an_error_is_answered_plainly_where_a_middleware_cannot_shape_it(stage: Stage) -> None:
    router = await stage.router(await stage.worker(), middlewares=stack("Misshaping"), api_key="key")
    answer = await router.ask("POST", "/generate", body=b"{}")
    assert (answer.status, answer.error_type) == (401, "unauthorized")
    assert b"secret" not in answer.body
    await stage.provoked("internal_error")


async def test_a_reply_that_it_began_and_did_not_end_is_broken_off(stage: Stage) -> None:
    router = await stage.router(await stage.worker(), middlewares=stack("Breaking"))
    with pytest.raises(CutReply) as cut:
        await router.ask("POST", "/generate", body=b"{}")
    assert cut.value.reply.status == 200
    await stage.provoked("internal_error")


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
