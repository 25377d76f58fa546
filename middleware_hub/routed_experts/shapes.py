"""The shape of a model's rows: an option, or read from the checkpoint's `config.json`. Without either, the width of a
row is learned from each engine's answers, for that engine only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from miles_router.errors import ConfigError
from miles_router.trajectory.rows import Blocks, RowKind, RowShape

MAX_EXPERTS = 1 << 16
DIGITS = 7
#: Ids that are checked together.
AT_ONCE = 1 << 17
#: The names of the number of experts in the `config.json` of model families.
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def parse_shape(text: str) -> RowShape:
    """Parse `LAYERSxEXPERTSxTOPK`, for example `48x128x8`.

    Raises:
        ConfigError: the text has another form, or impossible numbers.
    """
    numbers = _numbers(text)
    if len(numbers) != 3 or not 0 < numbers[2] <= numbers[1] <= MAX_EXPERTS or not numbers[0]:
        raise ConfigError(f"routed_experts_middleware.moe_shape: must be LAYERSxEXPERTSxTOPK (48x128x8), not {text!r}")
    layers, experts, top_k = numbers
    return RowShape(layers, top_k, experts)


def parse_indexer_shape(text: str) -> RowShape:
    """Parse `LAYERSxTOPK`, for example `61x2048`.

    Raises:
        ConfigError: the text has another form, or a zero.
    """
    numbers = _numbers(text)
    if len(numbers) != 2 or not all(numbers):
        raise ConfigError(f"indexer_topk_middleware.indexer_shape: must be LAYERSxTOPK (61x2048), not {text!r}")
    return RowShape(*numbers)


def _numbers(text: str) -> list[int]:
    """Return the whole numbers between the x; an empty list if a part is not a whole number."""
    parts = text.lower().split("x")
    numbers = [int(part) for part in parts if part.isdecimal() and part.isascii() and len(part) < DIGITS]
    return numbers if len(numbers) == len(parts) else []


def configured_shape(config: Mapping[str, Any]) -> RowShape | None:
    """Return the shape in a checkpoint's `config.json`; None for a model without experts.

    SGLang sizes its rows by `num_hidden_layers` and `num_experts_per_tok` of the language model's part (0.5.23,
    `state_capturer/routed_experts.py`): layers that do not route have rows too.
    """
    model = _text_model(config)
    layers, top_k = model.get("num_hidden_layers"), model.get("num_experts_per_tok")
    if type(layers) is not int or type(top_k) is not int or layers < 1 or top_k < 1:
        return None
    experts = next((model[name] for name in EXPERTS if type(model.get(name)) is int), None)
    return RowShape(layers, top_k, experts) if experts is None or top_k <= experts <= MAX_EXPERTS else None


def configured_indexer_shape(config: Mapping[str, Any]) -> RowShape | None:
    """Return the shape of chosen positions in a checkpoint's `config.json`; None for a model without sparse
    attention.

    SGLang sizes its rows by `index_topk` and the layers that have an indexer (0.5.23, `get_num_indexer_layers`):
    the layers whose `compress_ratios` are 4, else `num_indexer_layers`, else all layers.
    """
    model = _text_model(config)
    ratios = model.get("compress_ratios")
    layers = model.get("num_indexer_layers", model.get("num_hidden_layers"))
    if isinstance(ratios, list):
        layers = ratios.count(4)
    top_k = model.get("index_topk")
    if type(layers) is not int or type(top_k) is not int or layers < 1 or top_k < 1:
        return None
    return RowShape(layers, top_k)


def _text_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


@dataclass
class RowWidth:
    """The number of ids in a row, as learned from one engine's answers; `certain` once a second answer agrees."""

    ids: int | None = None
    certain: bool = False


class RowWidths(dict[RowKind, RowWidth]):
    """The learned widths of one engine process, by kind of rows."""

    def __missing__(self, kind: RowKind) -> RowWidth:
        width = self[kind] = RowWidth()
        return width


class ShapeCheck:
    """A check of the rows of every answer.

    Args:
        shape: the model's shape, if it is known. It overrides what an engine's answers have shown.
    """

    def __init__(self, kind: RowKind, shape: RowShape | None) -> None:
        self._kind = kind
        self._shape = shape

    @property
    def learns(self) -> bool:
        """Whether the width of a row must be learned."""
        return self._shape is None

    def rows(self, flat: Blocks, largest: int, start: int, expected: int, engine: RowWidth) -> Blocks:
        """Return ids as the `expected` rows from row `start` on.

        Args:
            largest: the largest id.
            engine: the learned width of the answering engine.

        Raises:
            InvalidTrajectory: its invariant is prefixed with the kind's ids. `of_the_model`: ids or rows of another
                model; `without_gap`: rows are missing; `without_overlap`: too many rows; `are_rows`: not a whole number
                of rows; `are_causal`: a position behind the row's own.
        """
        rows = self._in_rows(flat, largest, start, expected, engine)
        if self._kind.causal:
            self._check_causal(rows, start)
        return rows

    def _check_causal(self, rows: Blocks, start: int) -> None:
        """Check that no token attends to a later one. An engine may send other ids, such as slots of its KV cache."""
        step = max(AT_ONCE // rows.width, 1)
        for at in range(0, len(rows), step):
            largest = rows[at : at + step].max(axis=1)
            behind = largest > np.arange(start + at, start + at + len(largest))
            if behind.any():
                place = int(behind.argmax())
                reason = f"row {start + at + place} has position {largest[place]}, which is behind its own"
                raise self._kind.invalid("are_causal", reason)

    def _in_rows(self, flat: Blocks, largest: int, start: int, expected: int, engine: RowWidth) -> Blocks:
        shape, invalid = self._shape, self._kind.invalid
        if shape is not None and shape.choices is not None and largest >= shape.choices:
            raise invalid("of_the_model", f"id {largest} is not one of the model's {shape.choices} {self._kind.ids}")
        width = engine if shape is None else RowWidth(shape.width, certain=True)
        if expected <= 0 or width.ids is None:
            return self._learn_width(flat, start, expected, width)
        if not width.certain:
            width.certain = flat.size == expected * width.ids
            if not width.certain:
                first, width.ids = width.ids, None
                reason = f"{flat.size} ids are not {expected} rows of {first}, as in this engine's first answer"
                raise invalid("of_the_model", reason)
        count, rest = divmod(flat.size, width.ids)
        if rest:
            raise invalid("are_rows", f"{flat.size} ids are not a whole number of rows of {width.ids} ids")
        if count < expected:
            raise invalid("without_gap", f"rows {start + count} to {start + expected - 1} are missing")
        if count > expected:
            raise invalid("without_overlap", f"the worker sent {count} rows for the {expected} from row {start} on")
        return flat.with_width(width.ids)

    def _learn_width(self, flat: Blocks, start: int, expected: int, width: RowWidth) -> Blocks:
        """Return rows of an answer that defines the width, or that should have no rows."""
        invalid = self._kind.invalid
        if expected <= 0:
            if flat.size:
                raise invalid("without_overlap", f"the worker sent {flat.size} ids where no row was missing")
            return flat.with_width(width.ids or 1)
        ids, rest = divmod(flat.size, expected)
        if rest:
            raise invalid("are_rows", f"{flat.size} ids are not {expected} rows of equal length")
        if not ids:
            raise invalid("without_gap", f"rows {start} to {start + expected - 1} are missing")
        width.ids = ids
        return flat.with_width(ids)
