"""What one process reads of another's answer: all of it, or none."""

from __future__ import annotations

import pytest

from miles_router.cluster.owners.asking import _reply
from miles_router.errors import OwnerUnavailable

WHOLE = b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 5\r\n\r\nHello"


def test_an_answer_that_ended_anywhere_is_none() -> None:
    status, headers, body = _reply(WHOLE)
    assert (status, headers["content-type"], body) == (200, "text/plain", b"Hello")
    for end in range(len(WHOLE)):
        with pytest.raises(OwnerUnavailable):
            _reply(WHOLE[:end])
