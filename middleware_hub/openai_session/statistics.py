"""Metrics of sessions for `GET /metrics` and `GET /router/info`."""

from __future__ import annotations

from miles_router.middlewares import Statistics, counter, gauge

TOKENS = "Tokens of recorded turns, by origin."


class SessionStatistics(Statistics, prefix="miles_router_sessions"):
    """Counters since the start, and gauges of the present state."""

    sessions = gauge("Sessions held.", name="")
    bytes = gauge("Bytes of messages and arrays held.")
    created = counter("Sessions created.")
    expired = counter("Sessions forgotten after their idle timeout.")
    evicted = counter("Sessions of bare `X-Session-Id` headers that were forgotten to make room.")
    ended = counter(
        "Sessions ended, by reason. A session that continues with a shorter context ends again.", by="reason"
    )
    turns = counter("Turns recorded.")
    refused = counter("Sessions and turns refused for lack of room, by the bound that was reached.", by="bound")
    unrecorded_history = counter("Recorded turns whose history contains answers that the session did not record.")
    parsed = counter("Recorded turns that show all that was sampled (whole), and others by reason.", by="reason")
    untraced = counter("Requests not recorded.")
    invalid_answers = counter("Answers that contradict themselves and were refused, by worker.", by="worker")
    uncompared = counter("Samples too long to be compared with what the chat template writes.")
    sampled_tokens = counter(TOKENS, name="tokens", labels={"origin": "sampled"})
    given_tokens = counter(TOKENS, name="tokens", labels={"origin": "given"})
    reused_tokens = counter(TOKENS, name="tokens", labels={"origin": "reused"})

    def count_uncompared(self) -> None:
        self.uncompared += 1
