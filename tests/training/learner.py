"""The trainer's model: logprobs of tokens, and a clipped policy gradient on its last layers. Needs torch."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

#: How far a ratio of probabilities may go below and above 1 before its gradient is cut (DAPO's bounds).
LOW, HIGH = 0.2, 0.28
#: Rows of one forward pass.
ROWS = 16
MAX_NORM = 1.0


class Learner:
    """A causal language model of which the last `layers` layers and the last norm are trained, in float32."""

    def __init__(self, model: Path, *, layers: int, learning_rate: float) -> None:
        self._directory = model
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._model.requires_grad_(False)
        first = self._model.config.num_hidden_layers - layers
        self._trained = {
            name: parameter
            for name, parameter in self._model.named_parameters()
            if name == "model.norm.weight"
            or ((at := re.match(r"model\.layers\.(\d+)\.", name)) and int(at[1]) >= first)
        }
        for parameter in self._trained.values():
            parameter.requires_grad_(True)
        self._optimizer = torch.optim.AdamW(
            self._trained.values(), lr=learning_rate, weight_decay=0.0, betas=(0.9, 0.95)
        )

    def logprobs(self, tokens: Sequence[Any], masks: Sequence[Any]) -> np.ndarray:
        """Return the logprobs (float32) of the masked tokens of all rows, one row behind the other."""
        with torch.no_grad():
            parts = [
                self._forward(tokens[at : at + ROWS], masks[at : at + ROWS]).numpy()
                for at in range(0, len(tokens), ROWS)
            ]
        return np.concatenate(parts)

    def train(
        self, tokens: Sequence[Any], masks: Sequence[Any], old: Sequence[Any] | None, advantages: Sequence[float]
    ) -> float:
        """Take one step of the optimizer on these rows; return the share of tokens whose ratio was clipped.

        Args:
            old: the logprobs of each row's masked tokens when they were sampled; None: they are unknown, so each
                ratio is 1.
        """
        self._optimizer.zero_grad()
        count = sum(int(mask.sum()) for mask in masks)
        clipped = 0
        for at in range(0, len(tokens), ROWS):
            part = slice(at, at + ROWS)
            new = self._forward(tokens[part], masks[part])
            before = new.detach() if old is None else torch.from_numpy(np.concatenate(old[part]))
            advantage = torch.cat(
                [
                    torch.full((int(mask.sum()),), float(value))
                    for mask, value in zip(masks[part], advantages[part], strict=True)
                ]
            )
            ratio = torch.exp(new - before)
            bounded = ratio.clamp(1 - LOW, 1 + HIGH)
            loss = -torch.minimum(ratio * advantage, bounded * advantage).sum() / count
            loss.backward()
            outside = ((ratio > 1 + HIGH) & (advantage > 0)) | ((ratio < 1 - LOW) & (advantage < 0))
            clipped += int(outside.sum())
        torch.nn.utils.clip_grad_norm_(self._trained.values(), MAX_NORM)
        self._optimizer.step()
        return clipped / count

    def save(self, directory: Path) -> None:
        """Write the trained layers as a directory that the engine can load: the others have not changed."""
        directory.mkdir(parents=True)
        tensors = {name: parameter.detach().clone() for name, parameter in self._trained.items()}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        shutil.copy(self._directory / "config.json", directory)

    def _forward(self, tokens: Sequence[Any], masks: Sequence[Any]) -> torch.Tensor:
        width = max(map(len, tokens))
        ids, attention = (torch.zeros(len(tokens), width, dtype=torch.long) for _ in range(2))
        wanted = torch.zeros(len(tokens), width, dtype=torch.bool)
        for place, (row, mask) in enumerate(zip(tokens, masks, strict=True)):
            ids[place, : len(row)] = torch.from_numpy(row.astype(np.int64))
            attention[place, : len(row)] = 1
            wanted[place, : len(row)] = torch.from_numpy(mask.astype(bool))
        hidden = self._model.model(input_ids=ids, attention_mask=attention, use_cache=False).last_hidden_state
        logits = self._model.lm_head(hidden[:, :-1][wanted[:, 1:]])
        chosen = ids[:, 1:][wanted[:, 1:]].unsqueeze(-1)
        return torch.log_softmax(logits, -1).gather(-1, chosen).squeeze(-1)
