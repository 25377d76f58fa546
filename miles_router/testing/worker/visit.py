"""The request context that routes of the simulated worker receive, and the exceptions with which they refuse one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from miles_router.testing.worker.engine import Engine
from miles_router.testing.worker.exchange_log import Exchange
from miles_router.testing.worker.model.generation import GenerationRequest
from miles_router.testing.worker.reply import Reply
from miles_router.testing.worker.settings import Settings
from miles_router.testing.worker.wire.generate_output import OutputBuilder


class InternalError(Exception):
    """SGLang raises an unhandled Python error for this request; the answer is 500."""


class Refusal(Exception):
    """A request is refused with this status and JSON content."""

    def __init__(self, status: int, content: Any) -> None:
        super().__init__(content)
        self.status = status
        self.content = content


@dataclass(slots=True)
class Visit:
    """One request, and the parts of the worker that a route may use.

    A worker that imitates another engine has a subclass, which overrides `accept`, `adapter_in` and `output_builder`.
    """

    body: bytes
    query: dict[str, str]
    content_type: str
    path_tail: str
    reply: Reply
    exchange: Exchange
    engine: Engine
    settings: Settings

    @property
    def says_json(self) -> bool:
        """True if the content type is JSON; FastAPI does not parse any other body."""
        kind = self.content_type.partition(";")[0].strip().lower()
        return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))

    def json(self) -> dict[str, Any]:
        """Return the body parsed as a JSON object.

        Raises:
            Refusal: 400, the body is anything else.
        """
        if not self.body:
            raise invalid_body({"type": "missing", "loc": ("body",), "msg": "Field required", "input": None})
        value = self._parsed() if self.says_json else self.body
        if not isinstance(value, dict):
            problem = {
                "type": "dataclass_type",
                "loc": ("body",),
                "msg": "Input should be a dictionary",
                "input": value,
            }
            raise invalid_body(problem)
        return value

    def accept(self, samples: list[GenerationRequest], copies: int) -> list[GenerationRequest]:
        """Return the samples of a parsed request, completed with fields that only this kind of engine reads.

        Args:
            copies: samples of each prompt.

        Raises:
            ValueError: the engine refuses the request with 400.
        """
        return samples

    def adapter_in(self, body: Mapping[str, Any]) -> Any:
        """Return the name of the LoRA adapter that an OpenAI-style request names, or None.

        It is the part after the colon of `base:adapter` in `model`, whatever the base, else `lora_path`. A `model`
        without a colon is the base model.
        """
        model, served = str(body.get("model") or ""), self.settings.served_model_name
        behind = model[len(served) :] if model.startswith(f"{served}:") else model[model.find(":") :]
        named = behind[1:].strip() if ":" in model and model != served else ""
        return named or body.get("lora_path")

    def output_builder(self) -> OutputBuilder:
        """Return the builder of one sample's answers."""
        return OutputBuilder(self.engine, self.settings)

    def _parsed(self) -> Any:
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError as error:
            place, context = ("body", error.pos), {"error": error.msg}
            problem = {"type": "json_invalid", "loc": place, "msg": "JSON decode error", "input": {}, "ctx": context}
            raise invalid_body(problem) from error


def error_object(message: str, status: int, kind: str = "BadRequestError") -> dict[str, Any]:
    """Return SGLang's OpenAI-style error."""
    return {"object": "error", "message": message, "type": kind, "param": None, "code": status}


def invalid_body(*problems: Mapping[str, Any]) -> Refusal:
    """Return the 400 into which SGLang turns FastAPI's validation errors.

    Args:
        problems: FastAPI's errors, each with `type`, `loc` and `msg`.
    """
    count = f"{len(problems)} validation error{'s' if len(problems) > 1 else ''}"
    message = count + ":" + "".join(f"\n  {dict(problem)}" for problem in problems)
    return Refusal(400, error_object(message, 400, "Bad Request"))
