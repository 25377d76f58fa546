"""Workers found without registering: a file that is rewritten, truncated and garbled, and a real DNS server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest

from miles_router.fleet.sources import parse_file, parse_source
from miles_router.testing import SimulatedWorker
from tests.support.fleet import JSON
from tests.support.http import RawReply, ask
from tests.support.ports import free_ports
from tests.support.running_router import RunningRouter, command, router_process, running_router
from tests.support.waiting import PATIENCE, STEP, until

FAST: dict[str, Any] = {"health_check_interval": 0.05, "deep_health_check_interval": 0.0}
UPDATE = b'{"model_path": "/checkpoints/100", "weight_version": "100"}'
ANSWERS = b'{"text": "Hi", "sampling_params": {"max_new_tokens": 60, "ignore_eos": true}, "stream": true}'


async def workers_of(url: str) -> dict[str, dict[str, Any]]:
    """The registered workers by URL."""
    listed = orjson.loads((await ask(url, "GET", "/workers")).body)["workers"]
    return {worker["url"]: worker for worker in listed}


async def until_true(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait until `condition` returns True."""
    deadline = time.monotonic() + PATIENCE
    while not await condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE} s: {what}"
        await asyncio.sleep(STEP)


async def states(url: str) -> dict[str, str]:
    return {worker: found["state"] for worker, found in (await workers_of(url)).items()}


async def become(url: str, wanted: dict[str, str]) -> None:
    """Wait until exactly these workers are registered, in these states."""

    async def are() -> bool:
        return await states(url) == wanted

    await until_true(are, f"workers are {wanted}")


async def statistics(url: str) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads((await ask(url, "GET", "/router/info")).body)["statistics"]["discovery"]
    return found


async def read_again(url: str, source: str, times: int = 2) -> None:
    """Wait until this source was read `times` times more in vain."""
    before = (await statistics(url))["failures"].get(source, 0)

    async def read() -> bool:
        return bool((await statistics(url))["failures"].get(source, 0) >= before + times)

    await until_true(read, "the source was read again")


async def test_a_listed_worker_joins_and_an_unlisted_one_drains(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    source = f"file:{path}"
    async with (
        SimulatedWorker() as one,
        SimulatedWorker(token_latency_s=0.01) as other,
        running_router(discover=(source,), **FAST) as router,
    ):
        await read_again(router.url, source, 1)
        path.write_text(f"# a comment\n{one.url} labels=rack-7\n\n{other.url}  # the second\n")
        await become(router.url, {one.url: "ready", other.url: "ready"})
        record = (await workers_of(router.url))[one.url]
        assert (record["discovered"], record["labels"]) == (source, "rack-7")

        asking = [asyncio.ensure_future(ask(router.url, "POST", "/generate", JSON, ANSWERS)) for _ in range(4)]
        await until(lambda: other.running, "the second worker generates")
        path.write_text(f"{one.url}\n")
        await become(router.url, {one.url: "ready", other.url: "draining"})
        for reply in await asyncio.gather(*asking):
            assert reply.body.endswith(b"data: [DONE]\n\n")
        await become(router.url, {one.url: "ready"})
        path.write_text(f"{one.url}\n{other.url}\n")
        await become(router.url, {one.url: "ready", other.url: "ready"})
        counted = await statistics(router.url)
        assert (counted["added"], counted["drained"]) == ({source: 3}, {source: 1})


BROKEN = {
    "absent": None,
    "empty": b"",
    "cut in a line": b"http://127.0.0.1:3",
    "garbled": b"\xff\xfe\x00http\n",
    "no url": b"node-7:30000\n",
    "an unknown field": b"http://127.0.0.1:30000 weight=2\n",
    "a field without value": b"http://127.0.0.1:30000 model_id\n",
    "an open quote": b"http://127.0.0.1:30000 labels='a\n",
    "too large": b"#" * (4 * 1024 * 1024) + b"\n",
    "a line of 9 kB": b"http://127.0.0.1:30000 labels='" + b"a" * 9_000 + b"'\n",
    "a directory": os.curdir.encode(),
}


async def test_a_broken_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    source = f"file:{path}"
    async with SimulatedWorker() as worker, running_router(discover=(source,), **FAST) as router:
        for content in BROKEN.values():
            path.write_text(f"{worker.url}\n")
            await become(router.url, {worker.url: "ready"})
            path.unlink()
            if content == BROKEN["a directory"]:
                path.mkdir()
            elif content is not None:
                path.write_bytes(content)
            await read_again(router.url, source)
            assert await states(router.url) == {worker.url: "ready"}, content
            if path.is_dir():
                path.rmdir()
        (new := tmp_path / "new").write_text("# none\n")
        new.replace(path)
        await become(router.url, {})


async def test_a_source_that_hangs_holds_up_nothing_and_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "silent")
    path = tmp_path / "workers"
    async with SimulatedWorker() as worker:
        path.write_text(f"{worker.url}\n")
        given = ("--discover", f"file:{tmp_path / 'silent'}", f"file:{path}", "--health-check-interval", "0.1")
        async with router_process(*given) as router:
            await become(router.url, {worker.url: "ready"})
            await read_again(router.url, f"file:{tmp_path / 'silent'}", 1)


def test_a_wrong_word_is_not_shown_because_it_may_be_a_key() -> None:
    with pytest.raises(ValueError, match="line 1: field 1") as caught:
        parse_file("http://127.0.0.1:1 api_kez=secret\n")
    assert "secret" not in str(caught.value)


async def test_a_listed_worker_waits_for_the_weights_of_the_fleet(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    async with (
        SimulatedWorker(weight_version="7") as one,
        SimulatedWorker(weight_version="7") as other,
        SimulatedWorker(weight_version="6") as late,
        running_router(one.url, other.url, discover=(f"file:{path}",), **FAST) as router,
    ):
        await become(router.url, {one.url: "ready", other.url: "ready"})
        path.write_text(f"{late.url}\n")
        await become(router.url, {one.url: "ready", other.url: "ready", late.url: "outdated"})
        late.engine.weight_version = "7"
        await become(router.url, {one.url: "ready", other.url: "ready", late.url: "ready"})


async def test_what_others_registered_or_removed_stays_theirs(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    async with (
        SimulatedWorker() as own,
        SimulatedWorker() as listed,
        running_router(discover=(f"file:{path}",), **FAST) as router,
    ):
        assert (await ask(router.url, "POST", f"/add_worker?url={own.url}")).status == 200
        path.write_text(f"{own.url}\n{listed.url}\nhttp://127.0.0.1:1 worker_type=prefill\n")
        await become(router.url, {own.url: "ready", listed.url: "ready"})
        assert (await statistics(router.url))["refused"], "a prefill worker needs its port"
        assert (await ask(router.url, "POST", f"/remove_worker?url={listed.url}")).status == 200
        refused = (await statistics(router.url))["refused"][f"file:{path}"]

        async def looked() -> bool:
            return bool((await statistics(router.url))["refused"][f"file:{path}"] >= refused + 2)

        await until_true(looked, "two more reads")
        assert await states(router.url) == {own.url: "ready"}, "an operator's removal holds while it is listed"
        path.write_text("# none\n")
        await until_true(lambda: _lists(router.url, 0), "the list is empty")
        assert await states(router.url) == {own.url: "ready"}


async def _lists(url: str, count: int) -> bool:
    return set((await statistics(url))["listed"].values()) == {count}


async def test_a_worker_that_left_while_the_router_was_down_is_drained(tmp_path: Path) -> None:
    path, state = tmp_path / "workers", str(tmp_path / "state")
    given = ("--discover", f"file:{path}", "--state-dir", state, "--health-check-interval", "0.1", "--processes", "2")
    async with SimulatedWorker() as stays, SimulatedWorker() as leaves:
        path.write_text(f"{stays.url}\n{leaves.url}\n")
        async with router_process(*given) as router:
            await become(router.url, {stays.url: "ready", leaves.url: "ready"})
        path.write_text(f"{stays.url}\n")
        async with router_process(*given) as router:
            await become(router.url, {stays.url: "ready"})
            assert (await statistics(router.url))["drained"] == {f"file:{path}": 1}


async def test_newcomers_never_outvote_the_fleet_that_was_updated(tmp_path: Path) -> None:
    path, absent = tmp_path / "workers", f"file:{tmp_path / 'absent'}"
    async with contextlib.AsyncExitStack() as stack:
        trained, *new = [(await stack.enter_async_context(SimulatedWorker())).url for _ in range(4)]
        path.write_text(f"{trained}\n")
        router = await stack.enter_async_context(running_router(discover=(f"file:{path}", absent), **FAST))
        await become(router.url, {trained: "ready"})
        assert (await ask(router.url, "POST", "/update_weights_from_disk", JSON, UPDATE)).status == 200
        path.write_text("\n".join([trained, *new, ""]))
        await become(router.url, {trained: "ready"} | dict.fromkeys(new, "outdated"))
        path.write_text("\n".join([*new, ""]))
        await become(router.url, dict.fromkeys(new, "outdated"))
        await read_again(router.url, absent)
        assert await states(router.url) == dict.fromkeys(new, "outdated"), "an engine from the disk never serves"
        assert (await ask(router.url, "POST", "/update_weights_from_disk", JSON, UPDATE)).status == 200
        await become(router.url, dict.fromkeys(new, "ready"))


async def test_a_listed_worker_that_accepts_and_is_silent_holds_up_no_pause(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    async with SimulatedWorker() as worker, running_router(worker.url, discover=(f"file:{path}",), **FAST) as router:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            hung = f"http://127.0.0.1:{silent.getsockname()[1]}"
            path.write_text(f"{hung}\n")
            await become(router.url, {worker.url: "ready", hung: "unreached"})
            for order in ("/pause_generation", "/continue_generation"):
                reply = await asyncio.wait_for(ask(router.url, "POST", order, JSON, b"{}"), PATIENCE / 2)
                assert reply.status == 200


async def test_an_address_that_is_listed_for_another_model_is_another_worker(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    async with (
        SimulatedWorker(token_latency_s=0.01) as worker,
        running_router(discover=(f"file:{path}",), **FAST) as router,
    ):
        for listed, model in (("", None), ("model_id=other", "other"), ("worker_type=decode", None)):
            path.write_text(f"{worker.url} {listed}\n")

            async def joined(model: str | None = model, listed: str = listed) -> bool:
                found = (await workers_of(router.url)).get(worker.url, {})
                fields = (found.get("model_id"), found.get("worker_type", "regular"), found.get("state"))
                return fields == (model, "decode" if "decode" in listed else "regular", "ready")

            await until_true(joined, f"the worker is listed as {listed or 'a plain one'}")


@dataclass
class Listing:
    """A router with two listed workers, of which the second generates. `absent` is a source that is never read."""

    router: RunningRouter
    path: Path
    absent: str
    one: SimulatedWorker
    other: SimulatedWorker
    asking: Sequence[asyncio.Future[RawReply]]

    @classmethod
    @contextlib.asynccontextmanager
    async def generating(cls, folder: Path) -> AsyncIterator[Listing]:
        path, absent = folder / "workers", f"file:{folder / 'absent'}"
        async with (
            SimulatedWorker() as one,
            SimulatedWorker(token_latency_s=0.02) as other,
            running_router(discover=(f"file:{path}", absent), **FAST) as router,
        ):
            path.write_text(f"{one.url}\n{other.url}\n")
            await become(router.url, {one.url: "ready", other.url: "ready"})
            asking = [asyncio.ensure_future(ask(router.url, "POST", "/generate", JSON, ANSWERS)) for _ in range(4)]
            await until(lambda: other.running, "the second worker generates")
            yield cls(router, path, absent, one, other, asking)


async def test_what_an_operator_removes_stays_away_while_it_is_listed(tmp_path: Path) -> None:
    async with Listing.generating(tmp_path) as listing:
        router, path, one, other = listing.router, listing.path, listing.one, listing.other
        assert (await ask(router.url, "POST", f"/remove_worker?url={one.url}")).status == 200
        draining = asyncio.ensure_future(ask(router.url, "POST", f"/remove_worker?url={other.url}&drain=true"))
        await become(router.url, {other.url: "draining"})
        path.write_text(f"{one.url} labels=new\n{other.url} labels=new\n")
        await asyncio.gather(*listing.asking)
        assert (await draining).status == 200
        await read_again(router.url, listing.absent)
        assert await states(router.url) == {}


async def test_a_worker_that_disappears_during_a_pause_leaves_after_it(tmp_path: Path) -> None:
    path, absent = tmp_path / "workers", f"file:{tmp_path / 'absent'}"
    async with SimulatedWorker() as worker, running_router(discover=(f"file:{path}", absent), **FAST) as router:
        path.write_text(f"{worker.url}\n")
        await become(router.url, {worker.url: "ready"})
        assert (await ask(router.url, "POST", "/pause_generation", JSON, b"{}")).status == 200
        path.write_text("# none\n")
        await read_again(router.url, absent, 4)
        assert set(await states(router.url)) == {worker.url}
        assert (await ask(router.url, "POST", "/continue_generation", JSON, b"{}")).status == 200
        await become(router.url, {})
        assert not worker.engine.paused


async def test_a_worker_that_registers_itself_is_its_own_although_it_was_listed(tmp_path: Path) -> None:
    path, absent = tmp_path / "workers", f"file:{tmp_path / 'absent'}"
    async with (
        SimulatedWorker() as bare,
        SimulatedWorker() as labelled,
        running_router(discover=(f"file:{path}", absent), **FAST) as router,
    ):
        path.write_text(f"{bare.url}\n{labelled.url} labels=rack-7\n")
        await become(router.url, {bare.url: "ready", labelled.url: "ready"})
        for query in (bare.url, labelled.url):
            assert (await ask(router.url, "POST", f"/add_worker?url={query}")).status == 200
        path.write_text("# none\n")
        await read_again(router.url, absent, 4)
        found = await workers_of(router.url)
        assert set(found) == {bare.url, labelled.url}
        assert found[labelled.url]["labels"] == "rack-7"


async def test_a_draining_worker_that_is_listed_again_is_asked_before_it_takes_requests(tmp_path: Path) -> None:
    async with Listing.generating(tmp_path) as listing:
        router, path, one, other = listing.router, listing.path, listing.one, listing.other
        path.write_text(f"{one.url}\n")
        await become(router.url, {one.url: "ready", other.url: "draining"})
        other.faults.status(500, path="/model_info", times=None)
        path.write_text(f"{one.url}\n{other.url}\n")
        await become(router.url, {one.url: "ready", other.url: "unreached"})
        other.faults.clear()
        await become(router.url, {one.url: "ready", other.url: "ready"})
        assert all(reply.body.endswith(b"data: [DONE]\n\n") for reply in await asyncio.gather(*listing.asking))


async def test_workers_of_a_source_that_is_no_longer_set_are_drained(tmp_path: Path) -> None:
    before, after, state = tmp_path / "before", tmp_path / "after", str(tmp_path / "state")
    async with SimulatedWorker() as stays, SimulatedWorker() as leaves:
        before.write_text(f"{stays.url}\n{leaves.url}\n")
        after.write_text(f"{stays.url}\n")
        for path, wanted in ((before, (stays, leaves)), (after, (stays,))):
            given = ("--discover", f"file:{path}", "--state-dir", state, "--health-check-interval", "0.1")
            async with router_process(*given) as router:
                await become(router.url, {worker.url: "ready" for worker in wanted})


needs_dns = pytest.mark.skipif(
    shutil.which("dnsmasq") is None or os.geteuid() != 0, reason="needs dnsmasq, and a mount namespace for resolv.conf"
)


@contextlib.asynccontextmanager
async def dns_server(folder: Path) -> AsyncIterator[tuple[str, Path, asyncio.subprocess.Process]]:
    """A DNS server on port 53 of an address of its own; it reads the names from a file again at SIGHUP."""
    address, hosts = f"127.53.{os.getpid() >> 8 & 255}.{os.getpid() & 255 or 1}", folder / "hosts"
    hosts.touch()
    options = f"--keep-in-foreground --no-resolv --no-hosts --addn-hosts={hosts} --listen-address={address}"
    options += f" --bind-interfaces --local=/fleet/ --user=root --conf-file=/dev/null --pid-file={folder}/pid"
    process = await asyncio.create_subprocess_exec("dnsmasq", *options.split())
    try:
        yield address, hosts, process
    finally:
        process.kill()
        await process.wait()


@needs_dns
async def test_all_addresses_of_a_name_join_and_silence_changes_nothing(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    async with contextlib.AsyncExitStack() as stack:
        one, other = [
            await stack.enter_async_context(SimulatedWorker(host=host, port=port))
            for host in ("127.0.0.2", "127.0.0.3")
        ]
        address, hosts, server = await stack.enter_async_context(dns_server(tmp_path))
        (tmp_path / "resolv.conf").write_text(f"nameserver {address}\noptions timeout:1 attempts:1\n")
        source = f"dns://workers.fleet:{port}?labels=found"
        apart = f'mount --bind {tmp_path}/resolv.conf /etc/resolv.conf && exec "$@"'
        given = ("--discover", source, "--health-check-interval", "0.1")
        start = command("unshare", "--mount", "sh", "-c", apart, "sh")
        router = await stack.enter_async_context(router_process(*given, start=start))

        def names(*addresses: str) -> None:
            hosts.write_text("".join(f"{each} workers.fleet\n" for each in addresses))
            server.send_signal(signal.SIGHUP)

        await read_again(router.url, source, 1)
        names("127.0.0.2", "127.0.0.3")
        await become(router.url, {one.url: "ready", other.url: "ready"})
        assert (await workers_of(router.url))[one.url]["labels"] == "found"
        names("127.0.0.3")
        await become(router.url, {other.url: "ready"})
        names()
        await read_again(router.url, source)
        server.send_signal(signal.SIGSTOP)
        await read_again(router.url, source)
        assert await states(router.url) == {other.url: "ready"}
        server.send_signal(signal.SIGCONT)
        names("127.0.0.2")
        await become(router.url, {one.url: "ready"})


WRONG = (
    "workers.txt",
    "file:",
    "dns://workers",
    "dns://workers:0",
    "dns://workers:70000",
    "dns://:30000",
    "dns://workers:30000/path",
    "dns://workers:30000?weight=1",
    "dns://workers:30000?api_key=secret",
    "dns://workers:30000?worker_type=encode",
    "dns://user@workers:30000",
    "dns://[::1]:30000",
    "http://workers:30000",
)


@pytest.mark.parametrize("text", WRONG)
def test_a_source_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be|dns:"):
        parse_source(text)
