"""The APIs that a session speaks, asked alike: under the session's own address, or with its name in a header."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from tests.support.http import RawReply
from tests.support.session_trial import CHAT, SessionTrial, user

COMPLETIONS, MESSAGES, RESPONSES = "/v1/completions", "/v1/messages", "/v1/responses"
#: Where a request says its text, and how long its answer may be.
FIELDS = {
    CHAT: ("messages", "max_tokens"),
    COMPLETIONS: ("prompt", "max_tokens"),
    MESSAGES: ("messages", "max_tokens"),
    RESPONSES: ("input", "max_output_tokens"),
}


@dataclass(frozen=True)
class Api:
    """One of them. `named`: by a header."""

    path: str
    named: bool = False

    def __str__(self) -> str:
        return self.path.removeprefix("/v1/").partition("/")[0] + (", by a header" if self.named else "")

    async def ask(
        self, trial: SessionTrial, session: str, most: int, text: str = "Hi", *, stream: bool = False, **fields: Any
    ) -> RawReply:
        """One turn that begins anew, and its reply, whatever that is."""
        given, length = FIELDS[self.path]
        said = [user(text)] if given == "messages" else text
        body = {"model": "m", given: said, length: most, "stream": stream, **fields}
        if self.named:
            return await trial.ask("POST", self.path, body, [("X-Session-Id", session)])
        return await trial.ask("POST", f"/sessions/{session}{self.path}", body)

    def answers(self, reply: RawReply, *, stream: bool) -> list[Any]:
        """The answer, or all events of a stream."""
        assert reply.status == 200, reply.body
        if not stream:
            return [reply.json()]
        lines = [line for line in reply.body.split(b"\n") if line.startswith(b"data: {")]
        return [orjson.loads(line.removeprefix(b"data: ")) for line in lines]

    def end(self, reply: RawReply, *, stream: bool) -> str | None:
        """Why an answer ended."""
        for said in reversed(self.answers(reply, stream=stream)):
            if self.path == RESPONSES:
                response = said.get("response", said)
                return str((response["incomplete_details"] or {}).get("reason", response["status"]))
            if self.path == MESSAGES:
                reason = said.get("delta", said).get("stop_reason")
            else:
                reason = said["choices"][0]["finish_reason"] if said["choices"] else None
            if reason is not None:
                return str(reason)
        return None

    def model(self, reply: RawReply, *, stream: bool) -> str:
        """The model that an answer names."""
        first = self.answers(reply, stream=stream)[0]
        return str(first.get("message", first.get("response", first))["model"])

    def refusal(self, reply: RawReply, *, stream: bool = False) -> tuple[str, str]:
        """The code and the message of an error."""
        if self.path == RESPONSES and stream and reply.status == 200:
            created, _, failed = self.answers(reply, stream=True)
            assert (created["type"], failed["type"]) == ("response.created", "response.failed")
            error = failed["response"]["error"]
            return error["code"], error["message"]
        error = reply.json()["error"]
        if self.path == MESSAGES:
            assert (reply.json()["type"], error["type"]) == ("error", "invalid_request_error")
            return error["details"]["error_code"], error["message"]
        return error.get("code") or error["type"], error["message"]


APIS = [Api(path, named) for path in FIELDS for named in (False, True)]
#: Those whose turns are chat's.
CHATS = [api for api in APIS if api.path != COMPLETIONS]
