"""Faults on demand, for the next requests or for all requests until cleared."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. Build it with the methods of `Faults`."""

    name: str
    status: int = 500
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    first_byte_s: float = 0.0
    per_chunk_s: float = 0.0
    after_bytes: int = 0


@dataclass(slots=True)
class _Planned:
    fault: Fault
    path: str | None
    times: int | None

    def matches(self, path: str) -> bool:
        return self.path is None or self.path == path


class Faults:
    """The planned faults of a worker.

    Every method plans one fault for the next `times` requests on `path`. With `path=None` it applies to any path, with
    `times=None` until `clear()`. Faults apply in the order of planning. To refuse connections, call
    `SimulatedWorker.refuse()`.
    """

    def __init__(self) -> None:
        self._plan: list[_Planned] = []

    def hang(self, *, path: str | None = None, times: int | None = 1) -> None:
        """Read the request and never answer."""
        self._add(Fault("hang"), path, times)

    def slow(
        self, *, first_byte_s: float = 0.0, per_chunk_s: float = 0.0, path: str | None = None, times: int | None = 1
    ) -> None:
        """Answer correctly, but wait before the first byte and before every further chunk (seconds)."""
        self._add(Fault("slow", first_byte_s=first_byte_s, per_chunk_s=per_chunk_s), path, times)

    def reset_in_headers(self, *, path: str | None = None, times: int | None = 1) -> None:
        """Reset the connection (RST) in the middle of the reply's headers."""
        self._add(Fault("reset_in_headers"), path, times)

    def reset_in_body(self, *, after_bytes: int = 1, path: str | None = None, times: int | None = 1) -> None:
        """Answer correctly, but reset the connection (RST) after `after_bytes` of the body, or at its end."""
        self._add(Fault("reset_in_body", after_bytes=after_bytes), path, times)

    def cut_body(self, *, after_bytes: int = 1, path: str | None = None, times: int | None = 1) -> None:
        """Answer like `reset_in_body`, but close the connection with a FIN."""
        self._add(Fault("cut_body", after_bytes=after_bytes), path, times)

    def status(
        self,
        status: int,
        body: bytes = b'{"error":{"message":"simulated failure"}}',
        *,
        headers: Mapping[str, str] | None = None,
        path: str | None = None,
        times: int | None = 1,
    ) -> None:
        """Answer with this status and body. The content type is JSON unless `headers` contains another."""
        given = {"Content-Type": "application/json", **(headers or {})}
        self._add(Fault("status", status=status, body=body, headers=given), path, times)

    def garbage(
        self,
        body: bytes = b"\x16\x03\x01\x00 no http at all\r\n\r\n",
        *,
        path: str | None = None,
        times: int | None = 1,
    ) -> None:
        """Answer with bytes that are not HTTP, then close the connection."""
        self._add(Fault("garbage", body=body), path, times)

    def close(self, *, path: str | None = None, times: int | None = 1) -> None:
        """Read the request and close the connection (FIN) without sending a byte."""
        self._add(Fault("close"), path, times)

    def clear(self) -> None:
        """Drop all planned faults. Requests that already have a fault keep it."""
        self._plan.clear()

    def take(self, path: str) -> Fault | None:
        """Return the fault for a request on `path`, or None, and count it as used."""
        for planned in self._plan:
            if planned.matches(path):
                if planned.times is not None:
                    planned.times -= 1
                    if planned.times == 0:
                        self._plan.remove(planned)
                return replace(planned.fault)
        return None

    def _add(self, fault: Fault, path: str | None, times: int | None) -> None:
        if times is not None and times < 1:
            raise ValueError(f"times must be at least 1, or None for until cleared, got {times}")
        self._plan.append(_Planned(fault, path, times))
