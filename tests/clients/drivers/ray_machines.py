"""A router on a Ray cluster of two nodes, both on this machine: run by `tests/e2e/test_ray.py` where Ray is.

`python ray_machines.py WORKER_URL STATE_DIR CHECKPOINT`. Each step is printed once it holds.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

import miles_router.ray
from miles_router.settings.config import MiddlewareSpec, RouterConfig

SESSIONS = "middleware_hub.openai_session_middleware.OpenAISessionMiddleware"
#: Seconds: of a lease, and for which a fact is waited for. Ray takes half a minute to find a machine dead.
LEASE = 4.0
PATIENCE = 240.0
NUMBERS = itertools.count()
TURN = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 4}


def ask(url, method, path, turn="", **fields):
    """One request: status and what was answered; 0 where nobody did."""
    body = json.dumps(fields).encode() if method == "POST" else None
    headers = {"content-type": "application/json", **({"x-turn-id": turn} if turn else {})}
    request = urllib.request.Request(url + path, body, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"null")
    except (OSError, ValueError):
        return 0, None


def until(what, condition):
    """Wait for a fact, and say it."""
    ends = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < ends, what
        time.sleep(0.1)
    print(what, flush=True)
    return found


class At:
    """A shard, wherever it is now: one that is started again has another port."""

    def __init__(self, router, index):
        self.router, self.index = router, index

    def __add__(self, path):
        return self.router.urls[self.index] + path


def answered(url, method, path, **fields):
    """What is answered with 200, however often that has to be asked."""

    def tried():
        status, answer = ask(url, method, path, **fields)
        if status == 0 and isinstance(url, At):
            url.router.urls = url.router.find_urls()
        assert status in (0, 200, 502, 503), (status, answer)
        return (answer,) if status == 200 else None

    return until(f"{method} {path.partition('/sessions/')[0] or 'session'}", tried)[0]


def take_turn(url, session):
    """One turn, however often it has to be asked for."""
    name = f"turn-{next(NUMBERS)}"
    answered(url, "POST", f"/sessions/{session}/v1/chat/completions", turn=name, **TURN)


def turns(url, session):
    """How many a session has."""
    return len(answered(url, "GET", f"/sessions/{session}")["records"])


def main():
    worker, state, checkpoint = sys.argv[1:]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, namespace="tests", log_to_driver=True)
    config = RouterConfig(
        host="0.0.0.0",
        port=0,
        state_dir=state,
        state_sync="machine",
        hf_checkpoint=checkpoint,
        worker_urls=(worker,),
        middlewares=(MiddlewareSpec(SESSIONS),),
    )
    router = miles_router.ray.start(config, nodes=2, lease=LEASE)
    one, other = At(router, 0), At(router, 1)
    sessions = [answered(url, "POST", "/sessions")["session_id"] for url in (one, other)]
    for session in sessions:
        for url in (one, other):
            take_turn(url, session)
    assert [turns(one, session) for session in sessions] == [2, 2]
    print("both serve, and each finds what the other has", flush=True)

    assert answered(one, "POST", "/pause_generation", mode="in_place")
    info = answered(other, "GET", "/router/info")
    assert info["gate"]["closed"], info
    answered(other, "POST", "/continue_generation")
    print("a pause at one is a pause at all", flush=True)

    ray.kill(router.leader, no_restart=False)
    assert len(answered(other, "GET", "/router/info")["workers"]) == 1
    assert [turns(one, session) for session in sessions] == [2, 2]
    print("the control actor is back with its state", flush=True)

    stopped = ray.get(router.shards[0].pid.remote())
    os.kill(stopped, signal.SIGSTOP)
    take_turn(other, sessions[0])
    assert (found := turns(other, sessions[0])) == 3, found
    if Path(f"/proc/{stopped}").exists():
        os.kill(stopped, signal.SIGCONT)
    until("the one that had it has ended", lambda: not Path(f"/proc/{stopped}").exists())
    assert turns(other, sessions[0]) == 3, "and the next one knows what was done meanwhile"
    print("a stopped machine commits nothing", flush=True)

    nodes = {each["NodeID"] for each in ray.nodes()}
    assert len(nodes) == 2
    router.urls = router.find_urls()
    for index, actor in enumerate(router.shards):
        if ray.get(actor.node.remote()) == second.node_id:
            lost = index
            os.kill(ray.get(actor.pid.remote()), signal.SIGSTOP)  # or its actor would start the next one
    cluster.remove_node(second, allow_graceful=False)
    left = At(router, 1 - lost)
    for session in sessions:
        before = turns(left, session)
        take_turn(left, session)
        assert turns(left, session) == before + 1
    print(f"what machine {lost} had goes on at the other", flush=True)
    kept = [turns(left, session) for session in sessions]
    router.kill()

    settings = ["--worker-urls", worker, "--middleware-paths", SESSIONS, "--hf-checkpoint", checkpoint]
    settings += ["--host", "0.0.0.0", "--port", "0", "--state-dir", state, "--state-sync", "machine"]
    command = [sys.executable, "-m", "miles_router", "ray", "--address", cluster.address, "--nodes", "1", *settings]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        url = next(line.split()[1] for line in process.stderr if "listening" in line)
        try:
            assert len(answered(url, "GET", "/router/info")["workers"]) == 1
            assert [turns(url, session) for session in sessions] == kept, "they are in the state directory"
            process.terminate()
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
    print("the command serves, and ends in order", flush=True)
    ray.shutdown()
    cluster.shutdown()
    print("done", flush=True)


if __name__ == "__main__":
    main()
