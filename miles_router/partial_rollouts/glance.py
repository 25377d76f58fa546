"""What an event or an answer says of its end, seen without parsing it: most say again all that came before.

The first `"finish_reason":` in SGLang's JSON is the answer's own: before it stand only the text and the ids, and within
a string a quote is escaped.
"""

from __future__ import annotations

FINISH = b'"finish_reason":'
VERSION = b'"weight_version":'
INDEX = b'"index":'
RUNNING = b"null"
ABORT = b'"abort"'
NEAR = 128  # bytes within which a finish reason names its type
TAIL = 32  # bytes within which an event's last field stands


def finish(data: bytes) -> bytes:
    """What begins with the finish reason; nothing if there is none."""
    at = data.find(FINISH)
    return data[at + len(FINISH) : at + len(FINISH) + NEAR] if at >= 0 else b""


def may_be_aborted(data: bytes, answers: int) -> bool:
    """Whether one of so many answers may have been aborted."""
    at = -1
    for _ in range(answers):
        at = data.find(FINISH, at + 1)
        if at < 0 or ABORT in data[at : at + NEAR]:
            return True
    return False


def none_aborted(data: bytes, answers: int) -> bool:
    """Whether the beginning of a reply shows how so many answers ended, and that none was aborted."""
    at = -1
    for _ in range(answers):
        at = data.find(FINISH, at + 1)
        if at < 0 or at + NEAR > len(data) or ABORT in data[at : at + NEAR]:
            return False
    return True


def version(event: bytes) -> bytes:
    """Something that is the same for two events exactly if the weight versions they name are."""
    at = event.find(VERSION, event.find(FINISH))
    return event[at : event.find(b',"', at)] if at >= 0 else b""


def index(event: bytes) -> int | None:
    """Which of several generations an event is about; None if that cannot be seen."""
    at = event.rfind(INDEX, -TAIL)
    digits = event[at + len(INDEX) :].partition(b"}")[0] if at >= 0 else b""
    return int(digits) if digits.isdigit() else None
