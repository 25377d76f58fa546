"""Parse and check `sampling_params` as SGLang does."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GREEDY_BELOW = 1e-6
MAX_STOP_STRINGS = 32
# A `logit_bias` this large decides alone: logits of real models differ by less.
_CERTAIN_BIAS = 50.0


class WrongType(TypeError):
    """A field has a type that SGLang's schema rejects; the message is SGLang's."""


@dataclass(slots=True)
class SamplingParams:
    """One generation's parameters with SGLang's defaults. Some are accepted and have no effect here."""

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    n: int = 1
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None
    stream_interval: int | None = None
    beam_width: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    logit_bias: dict[str, float] | None = None
    custom_params: dict[str, Any] | None = None
    watermark: Any = None
    choice: list[str] | None = None

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> "SamplingParams":
        """Parse the parameters. Null means the default for every field but `max_new_tokens`.

        Raises:
            WrongType, ValueError: SGLang refuses them; the message is SGLang's.
        """
        for name, value in given.items():
            _check_type(name, value)
        kept = {name: value for name, value in given.items() if value is not None or name == "max_new_tokens"}
        params = cls(**kept)
        params.verify()
        return params

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def forced(self) -> int | None:
        """The id that `logit_bias` makes certain, or None."""
        bias, token = max(((bias, int(token)) for token, bias in (self.logit_bias or {}).items()), default=(0, 0))
        return token if bias >= _CERTAIN_BIAS else None

    @property
    def stop_regexes(self) -> list[str]:
        return [self.stop_regex] if isinstance(self.stop_regex, str) else list(self.stop_regex or ())

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def verify(self) -> None:
        """Check the values.

        Raises:
            ValueError: SGLang refuses them; the message is SGLang's.
        """
        for allowed, message in self._rules():
            if not allowed:
                raise ValueError(message)

    def _rules(self) -> list[tuple[bool, str]]:
        grammars = (self.json_schema, self.regex, self.ebnf, self.structural_tag)
        return [
            (
                math.isfinite(self.temperature) and self.temperature >= 0.0,
                f"temperature must be a non-negative finite number, got {self.temperature}.",
            ),
            (0.0 < self.top_p <= 1.0, f"top_p must be in (0, 1], got {self.top_p}."),
            (0.0 <= self.min_p <= 1.0, f"min_p must be in [0, 1], got {self.min_p}."),
            (self.top_k == -1 or self.top_k >= 1, f"top_k must be -1 (disable) or at least 1, got {self.top_k}."),
            *self._penalty_rules(),
            *self._length_rules(),
            (
                sum(grammar is not None for grammar in grammars) <= 1,
                "Only one of json_schema, regex, ebnf, or structural_tag can be set.",
            ),
            (
                len(self.stop_strings) <= MAX_STOP_STRINGS,
                f"at most {MAX_STOP_STRINGS} stop strings are allowed, got {len(self.stop_strings)}",
            ),
        ]

    def _penalty_rules(self) -> list[tuple[bool, str]]:
        return [
            (
                -2.0 <= self.frequency_penalty <= 2.0,
                f"frequency_penalty must be in [-2, 2], got {self.frequency_penalty}.",
            ),
            (
                -2.0 <= self.presence_penalty <= 2.0,
                f"presence_penalty must be in [-2, 2], got {self.presence_penalty}.",
            ),
            (
                0.0 < self.repetition_penalty <= 2.0,
                f"repetition_penalty must be in (0, 2] (1.0 = no penalty), got {self.repetition_penalty}.",
            ),
        ]

    def _length_rules(self) -> list[tuple[bool, str]]:
        most = self.max_new_tokens
        return [
            (
                self.min_new_tokens >= 0,
                f"min_new_tokens must be in [0, max_new_tokens], got {self.min_new_tokens}.",
            ),
            (most is None or most >= 0, f"max_new_tokens must be at least 0, got {most}."),
            (
                most is None or self.min_new_tokens <= most,
                f"min_new_tokens must be in [0, max_new_tokens({most})], got {self.min_new_tokens}.",
            ),
        ]


# In the order in which SGLang's error for an unknown field lists them.
_TYPES = {
    "max_new_tokens": "i64",
    "stop": "StringOrList",
    "stop_token_ids": "a sequence",
    "stop_regex": "StringOrList",
    "temperature": "f64",
    "top_p": "f64",
    "top_k": "i64",
    "min_p": "f64",
    "frequency_penalty": "f64",
    "presence_penalty": "f64",
    "repetition_penalty": "f64",
    "min_new_tokens": "i64",
    "n": "i64",
    "json_schema": "a string",
    "regex": "a string",
    "ebnf": "a string",
    "structural_tag": "a string",
    "ignore_eos": "a boolean",
    "skip_special_tokens": "a boolean",
    "spaces_between_special_tokens": "a boolean",
    "no_stop_trim": "a boolean",
    "stream_interval": "i64",
    "logit_bias": "a map",
    "sampling_seed": "i64",
    "custom_params": "anything",
    "beam_width": "i64",
    "watermark": "anything",
    "choice": "a sequence",
}
_ACCEPTED: dict[str, tuple[type, ...]] = {
    "i64": (int,),
    "f64": (int, float),
    "a string": (str,),
    "a boolean": (bool,),
    "a sequence": (list,),
    "a map": (dict,),
    "StringOrList": (str, list),
    "anything": (object,),
}


def _check_type(name: str, value: Any) -> None:
    expected = _TYPES.get(name)
    if expected is None:
        listed = ", ".join(f"`{known}`" for known in _TYPES)
        raise WrongType(f"unknown field `{name}`, expected one of {listed}")
    if value is None or type(value) in _ACCEPTED[expected] or expected == "anything":
        return
    if expected == "StringOrList":
        expected = "a value or an array of values for StringOrList"
    raise WrongType(f"invalid type: {_shown(value)}, expected {expected}")


def _shown(value: Any) -> str:
    """Return a value in the words of serde's error messages."""
    if isinstance(value, bool):
        return f"boolean `{str(value).lower()}`"
    if isinstance(value, (list, dict)):
        return "sequence" if isinstance(value, list) else "map"
    if isinstance(value, str):
        return f'string "{value}"'
    return f"{'integer' if isinstance(value, int) else 'floating point'} `{value}`"
