"""What stands in a state directory has a format with a number: another one is refused by name, and none changes without
its number."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest

from miles_router.errors import ConfigError
from miles_router.settings.config import MiddlewareSpec
from miles_router.slots import slot_of
from miles_router.state.blobs import header_of
from miles_router.state.inspection import holdings
from miles_router.state.journal import FORMAT
from miles_router.state.store import StateStore
from miles_router.testing import SimulatedWorker
from tests.support.cache_trial import CACHE, SHORT
from tests.support.experts_trial import EXPERTS, MOE, SHAPE
from tests.support.running_router import RunningRouter, running_router
from tests.support.session_trial import ADD, SESSIONS, qwen3, user
from tests.support.tokenizers import tokenizer_directory

JSON = [("Content-Type", "application/json")]


@contextlib.asynccontextmanager
async def on(directory: Path) -> AsyncIterator[RunningRouter]:
    """A router with every layer that holds something there."""
    layers = (MiddlewareSpec(SESSIONS), MiddlewareSpec(CACHE), MiddlewareSpec(EXPERTS, {"moe_shape": SHAPE}))
    model = tokenizer_directory("qwen3")
    async with SimulatedWorker(tokenizer=qwen3(), weight_version="1", moe=MOE) as worker:
        settings: dict[str, Any] = {"middlewares": layers, "hf_checkpoint": model, "state_rows": True}
        async with running_router(worker.url, state_dir=str(directory), **settings) as router:
            await router.probed()
            yield router


#: What blobs say of themselves in the format with this number, by the kind that their owner's head names; the others
#: are names, lists, or the user's own. Whoever changes one raises `FORMAT`, and so this number.
HELD: tuple[int, Mapping[str, str]] = (
    5,
    {
        "run": "kind",
        "worker": "api_key attributes kind pool url",
        "session": "bytes closed contract created_at end_reason finalized finish_reason group key kind made_by_a_turn "
        "metadata model segments tally tokens turns used used_at",
        "session.tally": "leaves reasons sampled tokens versions waited_s workers",
        "session.used": "tokens turns",
        "session step": "deleted replies responses rewards things turns untraced",
        "session step.turns": "answer choice context dropped ended_itself facts finish_reason given given_of messages "
        "parent path rows sampled segment side_call tools",
        "session step.replies": "body digest headers path turn_id",
        "session step.responses": "created_at cut_call id own seals settings usage",
        "session step.untraced": "at path reason request_id",
        "family": "chars kind number rank row_bytes serial tokens version",
        "family step": "asked block cache_versions far finish own parent rank reused reused_chars rid rows runs "
        "shared_chars shown_chars text worker",
        "large": "parent start type width",
    },
)
OLDER = FORMAT - 1


def make_older(directory: Path) -> None:
    """All that is there is of a format that is no longer read."""
    for path in directory.glob("*.sqlite"):
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute(f"PRAGMA user_version = {OLDER}")


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def said(directory: Path) -> dict[str, str]:
    """Return the fields of each kind of blobs."""
    found: dict[str, str] = {}

    def note(place: str, held: dict[str, Any]) -> None:
        found[place] = " ".join(sorted(held))
        for name, each in held.items():
            if f"{place}.{name}" in HELD[1]:
                for one in each if isinstance(each, list) else [each]:
                    note(f"{place}.{name}", one)

    for path in directory.glob("*.sqlite"):
        with contextlib.closing(sqlite3.connect(path)) as connection:
            kinds = {}
            for owner, seq, blob in connection.execute("SELECT owner, seq, blob FROM journal ORDER BY owner, seq"):
                if seq == 0:
                    kinds[owner] = orjson.loads(blob)["kind"]
                    note(kinds[owner], orjson.loads(blob))
                elif owner in kinds:
                    note(f"{kinds[owner]} step", header_of(blob)[0])
            for (blob,) in connection.execute("SELECT blob FROM large"):
                note("large", header_of(blob)[0])
    return found


async def test_what_is_held_changes_with_the_number_of_its_format_alone(tmp_path: Path) -> None:
    turn: dict[str, Any] = {"messages": [user("Hi.")], "max_tokens": 4, "tools": [ADD]}
    for_responses = {"model": "m", "input": "Hello", "max_output_tokens": 4}
    async with on(tmp_path) as router:
        for path, headers, body in (
            ("/sessions", (), {"session_id": "s"}),
            ("/sessions/s/v1/chat/completions", [("X-Turn-Id", "1")], turn),
            ("/sessions/s/v1/responses", (), for_responses),
            ("/sessions/s/generate", (), {"text": "x", "sampling_params": SHORT}),
            ("/generate", (), {"text": "Hi", "sampling_params": SHORT}),
            ("/add_worker?url=http://127.0.0.1:1", (), {}),
        ):
            answer = await router.ask("POST", path, [*JSON, *headers], orjson.dumps(body))
            assert answer.status == 200, answer
    number, held = HELD
    assert said(tmp_path) == held
    assert number == FORMAT


@pytest.mark.alone("several processes open slots at their start, and refuse it there")
async def test_a_directory_of_another_format_is_refused_by_name_and_left_as_it_is(tmp_path: Path) -> None:
    async with on(tmp_path) as router:
        await router.ask("POST", "/sessions", JSON, b'{"session_id": "s"}')
    make_older(tmp_path)
    before = contents(tmp_path)
    refused = f"its format is {OLDER}, and this miles-router reads {FORMAT}"
    with pytest.raises(ConfigError, match=f"^state_dir: .*control.sqlite: {refused}"):
        StateStore(tmp_path).check()
    with pytest.raises(ConfigError, match=f"^state: .*: {refused}"):
        list(holdings(tmp_path))
    assert contents(tmp_path) == before
    for name in ("control.sqlite", "control.acknowledged"):
        (tmp_path / name).unlink()
    async with on(tmp_path) as router:
        answer = await router.ask("GET", "/sessions/s")
        assert (answer.status, answer.json()["error"]["type"]) == (500, "state_failed")
        assert refused in answer.json()["error"]["message"]
    name = f"slot-{slot_of('s'):02d}.sqlite"
    assert contents(tmp_path)[name] == before[name]
