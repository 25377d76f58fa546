"""Build a tiny tokenizer for experiments without a model: `python -m miles_router.testing.tiny_tokenizer DIR`.

Byte-level BPE with a few hundred tokens and the chat markup of Qwen, as `tokenizer.json` and `tokenizer_config.json`.
The router takes the directory as `--hf-checkpoint`, simulated workers as `--tokenizer`. Needs the package `tokenizers`.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 600
LINES = (
    "<|im_start|>user\nQuestion: what is 17 plus 25? Answer with a number.<|im_end|>\n<|im_start|>assistant\n",
    "The answer is the sum of the two numbers, and the sum is 42. Let me check: 17 + 25 = 42.",
    "Are you sure? Think again, step by step, and give the final answer at the end of the line.",
    "I think that the answer to the question is right. First add the tens, then add the ones.",
    "Ein Satz auf Deutsch, un peu de français, 数字は四十二です, и немного по-русски 🙂",
)
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build(directory: Path) -> None:
    """Train the tokenizer, which takes milliseconds, and save it in `directory`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m miles_router.testing.tiny_tokenizer DIRECTORY", file=sys.stderr)
        return 2
    build(Path(arguments[0]))
    print(f"tokenizer written to {arguments[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
