"""A tiny Qwen3 mixture of experts with random weights, written with SGLang-Jax's own libraries:

PYTHON make_model.py DIRECTORY TOKENIZER_DIRECTORY
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

VOCABULARY, HIDDEN, LAYERS, HEADS, KV_HEADS = 151_936, 64, 2, 2, 1
HEAD = 128  # the first request to a model with another one ends the server
EXPERTS, TOP_K, INNER = 8, 2, 32
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "eos_token_id": 151_645,
    "bos_token_id": None,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "attention_bias": False,
    "use_sliding_window": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": INNER,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "output_router_logits": False,
}


def shapes() -> dict[str, tuple[int, ...]]:
    """Every matrix of the model."""
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        here = f"model.layers.{layer}."
        found[here + "self_attn.q_proj.weight"] = (HEADS * HEAD, HIDDEN)
        found[here + "self_attn.k_proj.weight"] = (KV_HEADS * HEAD, HIDDEN)
        found[here + "self_attn.v_proj.weight"] = (KV_HEADS * HEAD, HIDDEN)
        found[here + "self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD)
        found[here + "mlp.gate.weight"] = (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            inner = f"{here}mlp.experts.{expert}."
            found[inner + "gate_proj.weight"] = found[inner + "up_proj.weight"] = (INNER, HIDDEN)
            found[inner + "down_proj.weight"] = (HIDDEN, INNER)
    return found


def norms() -> dict[str, int]:
    """Every norm, which is all ones."""
    found = {"model.norm.weight": HIDDEN}
    for layer in range(LAYERS):
        here = f"model.layers.{layer}."
        found[here + "input_layernorm.weight"] = found[here + "post_attention_layernorm.weight"] = HIDDEN
        found[here + "self_attn.q_norm.weight"] = found[here + "self_attn.k_norm.weight"] = HEAD
    return found


def main() -> None:
    import jax
    import jax.numpy as jnp
    from safetensors.flax import save_file

    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("tokenizer", type=Path)
    given = parser.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(given.tokenizer / file, given.directory / file)
    (given.directory / "config.json").write_text(json.dumps(CONFIG, indent=1))
    (given.directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [151_645, 151_643]}))
    keys = jax.random.split(jax.random.PRNGKey(0), len(shapes()))
    weights = {name: jnp.ones((size,), jnp.bfloat16) for name, size in norms().items()}
    for key, (name, shape) in zip(keys, shapes().items(), strict=True):
        scale = 0.3 if name.endswith("mlp.gate.weight") else 0.02  # experts far enough apart that none is a tie
        weights[name] = (jax.random.normal(key, shape) * scale).astype(jnp.bfloat16)
    save_file(weights, given.directory / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
