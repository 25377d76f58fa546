"""Write a tiny random-weight Qwen3 that vLLM serves on a CPU, and an adapter of it: `make_model.py DIR TOKENIZER SEED`.

Heads of 32 are the smallest that vLLM's attention on a CPU computes: with 16 its first request ends it.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

RANK, LAYERS, HIDDEN, HEADS, KEYS, HEAD = 4, 4, 64, 4, 2, 32


def main(directory: Path, tokenizer: Path, seed: int) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    for part in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / part, directory / part)
    end = AutoTokenizer.from_pretrained(directory).eos_token_id
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEYS,
        head_dim=HEAD,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        eos_token_id=end,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    adapter = directory / "adapter"
    adapter.mkdir()
    tensors = {}
    for layer in range(LAYERS):
        for name, width in (("q_proj", HEADS * HEAD), ("v_proj", KEYS * HEAD)):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, HIDDEN)
            tensors[f"{stem}.lora_B.weight"] = torch.randn(width, RANK)
    save_file(tensors, adapter / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
