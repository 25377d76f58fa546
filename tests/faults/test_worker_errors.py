"""What a worker answers is its answer: 4xx and 5xx pass unchanged, and nobody else is asked."""

from __future__ import annotations

from tests.support.scripted_worker import CLOSE, LAST_CHUNK, chunk, chunked_head, head, reply, script
from tests.support.session_apis import case
from tests.support.stage import Stage

ODD_JSON = b'{ "error" : {"message":"caf\xc3\xa9 \\u00e9","code":400} ,\n"big":12345678901234567890, "nan":NaN}\n\n'


STATUSES = (400, 401, 403, 404, 405, 409, 413, 422, 429, 499, 500, 501, 502, 503, 504, 529)


async def test_error_replies_pass_byte_for_byte_and_are_not_retried(stage: Stage) -> None:
    headers = [("Content-Type", "application/json"), ("Retry-After", "7"), ("X-Reason", "a, b"), ("X-Reason", "c")]
    workers = [await stage.worker() for _ in range(2)]
    router = await stage.router(*workers)
    for count, status in enumerate(STATUSES, 1):
        with case(status):
            for worker in workers:
                worker.always(script(reply(ODD_JSON, status, headers)))
            answer = await router.ask("POST", "/generate", body=b"{}")
            assert (answer.status, answer.body) == (status, ODD_JSON)
            assert (answer.values("retry-after"), answer.values("x-reason")) == ([b"7"], [b"a, b", b"c"])
            assert sum(len(worker.requests) for worker in workers) == count
    assert [worker.failures for worker in router.pool] == [0, 0]


async def test_error_replies_pass_in_every_framing(stage: Stage) -> None:
    worker = await stage.worker()
    router = await stage.router(worker)
    for status in (400, 500):
        for framing, answered, body in (
            ("chunked", script(chunked_head(status=status), chunk(b"Some"), chunk(b"thing"), LAST_CHUNK), b"Something"),
            ("until close", script(head(status) + b"Something", CLOSE), b"Something"),
            ("empty", script(reply(b"", status)), b""),
        ):
            with case(status, framing):
                worker.next(answered)
                answer = await router.ask("POST", "/generate", body=b"{}")
                assert (answer.status, answer.body) == (status, body)


async def test_redirects_are_the_clients_business(stage: Stage) -> None:
    worker = await stage.worker()
    router = await stage.router(worker)
    statuses = (301, 302, 307, 308)
    for status in statuses:
        with case(status):
            worker.next(script(reply(b"", status, [("Location", "/elsewhere?x=%2F")])))
            answer = await router.ask("GET", "/here")
            assert (answer.status, answer.value("location")) == (status, b"/elsewhere?x=%2F")
    assert len(worker.requests) == len(statuses)


async def test_a_not_modified_reply_that_names_a_length_does_not_hold_the_client(stage: Stage) -> None:
    worker = await stage.worker()
    router = await stage.router(worker)
    client = await stage.client(router)
    for _ in range(2):
        worker.next(script(head(304, [("Content-Length", "500")])))
        assert (await client.ask("GET", "/cached")).status == 304


async def test_not_modified_and_no_content_end_without_a_body(stage: Stage) -> None:
    worker = await stage.worker()
    router = await stage.router(worker)
    client = await stage.client(router)
    for status in (304, 204, 304, 204):
        worker.next(script(head(status, [("ETag", '"a"')])))
        answer = await client.ask("GET", "/cached")
        assert (answer.status, answer.body, answer.value("etag")) == (status, b"", b'"a"')
