"""The model's routing: told by the operator or by the checkpoint's configuration; the length of a row is learned from
the engine's answers where neither tells it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_router.errors import ConfigError
from miles_router.middlewares.experts import Experts
from miles_router.trajectory import InvalidTrajectory
from miles_router.trajectory.experts import Blocks, ExpertShape

MAX_EXPERTS = 1 << 16
DIGITS = 7
#: What model families call their number of experts.
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def parse_shape(text: str) -> ExpertShape:
    """`LAYERSxEXPERTSxTOPK`, for example `48x128x8`.

    Raises:
        ConfigError: it is not that.
    """
    parts = text.lower().split("x")
    numbers = [int(part) for part in parts if part.isdecimal() and part.isascii() and len(part) < DIGITS]
    if len(parts) != 3 or len(numbers) != 3 or not 0 < numbers[2] <= numbers[1] <= MAX_EXPERTS or not numbers[0]:
        raise ConfigError(f"routed_experts_middleware.moe_shape: must be LAYERSxEXPERTSxTOPK (48x128x8), not {text!r}")
    layers, experts, top_k = numbers
    return ExpertShape(layers, top_k, experts)


def configured_shape(config: Mapping[str, Any]) -> ExpertShape | None:
    """The shape that a checkpoint's `config.json` tells; None for one that is no mixture of experts.

    SGLang sizes its rows by `num_hidden_layers` and `num_experts_per_tok` of the language model's part (0.5.23,
    `state_capturer/routed_experts.py`): layers that do not route have rows too.
    """
    text = config.get("text_config")
    model = text if isinstance(text, Mapping) else config
    layers, top_k = model.get("num_hidden_layers"), model.get("num_experts_per_tok")
    if type(layers) is not int or type(top_k) is not int or layers < 1 or top_k < 1:
        return None
    experts = next((model[name] for name in EXPERTS if type(model.get(name)) is int), None)
    return ExpertShape(layers, top_k, experts) if experts is None or top_k <= experts <= MAX_EXPERTS else None


class Model:
    """The shape that all answers must have: how many ids a row has, and how many of them are one layer's."""

    def __init__(self, experts: Experts, told: ExpertShape | None) -> None:
        experts.shape = told
        self._told = told
        self._width: int | None = None if told is None else told.width
        self._believed = told is not None  # a length that was learned is, once a second answer has it

    def rows(self, flat: Blocks, largest: int, start: int, expected: int) -> Blocks:
        """Ids as rows: the `expected` ones from row `start` on.

        Raises:
            InvalidTrajectory: `experts_of_the_model`: ids or rows of another model; `experts_without_gap`,
                `experts_without_overlap`: fewer rows, or more; `experts_are_rows`: no whole number of them.
        """
        if self._told is not None and self._told.experts is not None and largest >= self._told.experts:
            raise InvalidTrajectory("experts_of_the_model", f"expert {largest} of a model with {self._told.experts}")
        if expected <= 0 or self._width is None:
            return self._first(flat, start, expected)
        if not self._believed:
            self._believed = flat.size == expected * self._width
            if not self._believed:
                width, self._width = self._width, None
                reason = f"{flat.size} ids are no {expected} rows of {width}, as in the first answer"
                raise InvalidTrajectory("experts_of_the_model", reason)
        count, rest = divmod(flat.size, self._width)
        if rest:
            raise InvalidTrajectory(
                "experts_are_rows", f"{flat.size} ids are no whole number of rows of {self._width} ids"
            )
        if count < expected:
            raise InvalidTrajectory(
                "experts_without_gap", f"rows {start + count} to {start + expected - 1} are missing"
            )
        if count > expected:
            raise InvalidTrajectory(
                "experts_without_overlap", f"{count} rows came for the {expected} from row {start} on"
            )
        return flat.in_rows_of(self._width)

    def _first(self, flat: Blocks, start: int, expected: int) -> Blocks:
        """Of an answer whose rows tell the width, or of one that should have none."""
        if expected <= 0:
            if flat.size:
                raise InvalidTrajectory("experts_without_overlap", f"{flat.size} ids came where no row is missing")
            return flat.in_rows_of(self._width or 1)
        width, rest = divmod(flat.size, expected)
        if rest:
            raise InvalidTrajectory("experts_are_rows", f"{flat.size} ids are no {expected} rows of equal length")
        if not width:
            raise InvalidTrajectory("experts_without_gap", f"rows {start} to {start + expected - 1} are missing")
        self._width = width
        return flat.in_rows_of(width)
