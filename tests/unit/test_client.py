"""The client: when it asks again, what importing it costs, and which answers it takes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from miles_router.client import Retries, RouterClient
from miles_router.client.answers import Generation
from miles_router.client.errors import InvalidReply
from miles_router.client.router_client import _generate_body

LISTED = "import sys, {}; print(*sorted(name for name in sys.modules if '.' not in name or 'miles_router.' in name))"
SHARED = {f"miles_router.{name}" for name in ("dialects", "engines", "errors", "tasks", "trajectory", "version")}
SERVER = {"starlette", "uvicorn", "uvloop", "httptools", "prometheus_client", "yaml", "transformers", "middleware_hub"}


def loaded_by(module: str) -> set[str]:
    found = subprocess.run([sys.executable, "-c", LISTED.format(module)], capture_output=True, text=True, check=True)
    return set(found.stdout.split())


def test_the_client_imports_nothing_of_the_server() -> None:
    loaded = loaded_by("miles_router.client")
    assert not loaded & SERVER
    ours = {name for name in loaded if name.startswith("miles_router.") and not name.startswith("miles_router.client")}
    assert {".".join(name.split(".")[:2]) for name in ours} == SHARED


def test_waiting_grows_is_spread_and_is_bounded() -> None:
    retries = Retries(attempts=9, first_delay=1.0, longest_delay=5.0)
    for failures, full in enumerate((1.0, 2.0, 4.0, 5.0, 5.0)):
        delays = {retries.delay(failures) for _ in range(50)}
        assert all(full / 2 <= delay <= full for delay in delays)
        assert len(delays) > 1, "those that failed together do not come back together"


def test_the_routers_word_counts_up_to_the_bound() -> None:
    retries = Retries(first_delay=0.0, longest_delay=5.0)
    assert retries.delay(0) == 0.0
    assert retries.delay(0, 3.0) == 3.0
    assert retries.delay(0, 60.0) == 5.0


@pytest.mark.parametrize("url", ["", "host:30000", "ftp://host", "http://", "http://host/?a=b", "http://host/#a"])
def test_what_is_no_address_of_a_router_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="base_url"):
        RouterClient(url)


def test_a_generation_is_of_one_prompt_and_one() -> None:
    assert _generate_body("a", None, {"n": 1}, None, {"x": None, "y": 0}) == {
        "text": "a",
        "sampling_params": {"n": 1},
        "y": 0,
    }
    for text, ids in ((None, None), ("a", [1])):
        with pytest.raises(ValueError, match="not both"):
            _generate_body(text, ids, None, None, {})
    with pytest.raises(ValueError, match="n must be 1"):
        _generate_body("a", None, {"n": 2}, None, {})


META: dict[str, Any] = {"id": "r", "prompt_tokens": 3, "finish_reason": {"type": "stop", "matched": 2}}
ANSWER: dict[str, Any] = {"text": "ab", "output_ids": [4, 5], "meta_info": META}


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        [ANSWER],
        {},
        {**ANSWER, "meta_info": None},
        *({name: value for name, value in ANSWER.items() if name != gone} for gone in ANSWER),
        *({**ANSWER, "meta_info": {name: META[name] for name in META if name != gone}} for gone in META),
    ],
)
def test_what_is_no_generation_is_refused(answer: Any) -> None:
    with pytest.raises(InvalidReply):
        Generation.from_json(answer)


@pytest.mark.parametrize("reason", [None, {"type": "unheard of"}])
def test_what_has_not_ended_in_a_known_way_is_no_sample(reason: Any) -> None:
    made = Generation.from_json({**ANSWER, "meta_info": {**META, "finish_reason": reason}})
    with pytest.raises(InvalidReply, match="finish reason"):
        _ = made.status
