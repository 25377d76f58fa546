"""The model: Qwen3-MoE, of which the configuration is written here and the weights are random numbers.

`python -m tests.gpu.model DIRECTORY --tokenizer DIRECTORY [--layers N]` writes what SGLang reads with
`--load-format dummy`. The shape is that of Qwen3-30B-A3B, with fewer layers where that is wanted. The weights come
from `tests.gpu.sender`.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
#: Standard deviation of the logits. With 4 a sampled token has about the entropy of a model that writes freely, and
#: errors of the arithmetic come out in logprobs as large as they do there.
LOGITS = 4.0
ROUTER_LOGITS = 2.0
BYTES = 2  # of a bfloat16


@dataclass(frozen=True)
class Shape:
    """What decides the weights, in the words of the model's `config.json`."""

    num_hidden_layers: int = 48
    hidden_size: int = 2048
    num_attention_heads: int = 32
    num_key_value_heads: int = 4
    head_dim: int = 128
    num_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768
    vocab_size: int = 151936

    @property
    def moe_shape(self) -> str:
        """As the router's `moe_shape` option spells it."""
        return f"{self.num_hidden_layers}x{self.num_experts}x{self.num_experts_per_tok}"

    @property
    def bytes(self) -> int:
        return sum(weight.bytes for weight in weights(self))


@dataclass(frozen=True)
class Weight:
    """A tensor of a checkpoint, filled with normal numbers around `mean`."""

    name: str
    shape: tuple[int, ...]
    deviation: float
    mean: float = 0.0

    @property
    def bytes(self) -> int:
        return BYTES * math.prod(self.shape)


def weights(shape: Shape) -> Iterator[Weight]:
    """All tensors, named as in a checkpoint. Activations keep about one size through all layers."""
    hidden, heads = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    keys, inner = shape.num_key_value_heads * shape.head_dim, shape.moe_intermediate_size
    residual = 1 / math.sqrt(2 * shape.num_hidden_layers)
    yield Weight("model.embed_tokens.weight", (shape.vocab_size, hidden), 1.0)
    for number in range(shape.num_hidden_layers):
        layer = f"model.layers.{number}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield Weight(f"{layer}.{norm}.weight", (hidden,), 0.05, 1.0)
        for norm in ("q_norm", "k_norm"):
            yield Weight(f"{layer}.self_attn.{norm}.weight", (shape.head_dim,), 0.05, 1.0)
        for name, rows in (("q_proj", heads), ("k_proj", keys), ("v_proj", keys)):
            yield Weight(f"{layer}.self_attn.{name}.weight", (rows, hidden), hidden**-0.5)
        yield Weight(f"{layer}.self_attn.o_proj.weight", (hidden, heads), residual * heads**-0.5)
        yield Weight(f"{layer}.mlp.gate.weight", (shape.num_experts, hidden), ROUTER_LOGITS * hidden**-0.5)
        for expert in range(shape.num_experts):
            mlp = f"{layer}.mlp.experts.{expert}"
            yield Weight(f"{mlp}.gate_proj.weight", (inner, hidden), hidden**-0.5)
            yield Weight(f"{mlp}.up_proj.weight", (inner, hidden), hidden**-0.5)
            yield Weight(f"{mlp}.down_proj.weight", (hidden, inner), 4 * residual * inner**-0.5)
    yield Weight("model.norm.weight", (hidden,), 0.05, 1.0)
    yield Weight("lm_head.weight", (shape.vocab_size, hidden), LOGITS * hidden**-0.5)


def buckets(shape: Shape, size: int) -> Iterator[list[Weight]]:
    """The same tensors in their order, so many that they take at most `size` bytes; one that is larger stands alone."""
    bucket: list[Weight] = []
    filled = 0
    for weight in weights(shape):
        if bucket and filled + weight.bytes > size:
            yield bucket
            bucket, filled = [], 0
        bucket.append(weight)
        filled += weight.bytes
    yield bucket


def read_shape(directory: Path) -> Shape:
    """That of a model which `write` wrote."""
    config = json.loads((directory / "config.json").read_text())
    return Shape(**{name: config[name] for name in Shape.__dataclass_fields__})


def write(directory: Path, tokenizer: Path, shape: Shape) -> None:
    """Write `config.json`, and the tokenizer's files beside it."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, directory / name)
    (directory / "config.json").write_text(json.dumps(_config(shape), indent=2))


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": 151645,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "norm_topk_prob": True,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        **{name: getattr(shape, name) for name in Shape.__dataclass_fields__},
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.model", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="directory with a tokenizer of Qwen3")
    parser.add_argument("--layers", type=int, default=Shape.num_hidden_layers)
    arguments = parser.parse_args()
    shape = Shape(num_hidden_layers=arguments.layers)
    write(arguments.directory, arguments.tokenizer, shape)
    print(f"{arguments.directory}: {shape.moe_shape}, {shape.bytes / 1e9:.1f} GB of weights")


if __name__ == "__main__":
    main()
