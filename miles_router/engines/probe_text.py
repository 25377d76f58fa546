"""A text that different tokenizers encode to different ids. No I/O."""

from __future__ import annotations

from collections.abc import Iterable

#: Texts that tokenizers treat differently, one kind per line.
KINDS = (
    # The first line starts without a space: some tokenizers add one there. transformers 5.3 reads the line as
    # "helloworld".
    "hello  world, hello   again",
    "don't you'll WE'RE it'S I'M D'Arcy 'tis rock'n'roll O'Sullivan 'Twas 'Define L'Love l\u2019été",
    "camelCaseWords HTTPServerError XMLHttpRequest2 snake_case kebab-case CONSTANT_1 iOS \u01c5ungla \u02b0a",
    "x1234567890 3.14159 1,000,000 12 123 1234 0x1F a1b22c333 \u0663\u0664\u0665 \u00bd x\u00b2 \u2167 1st",
    "漢字かなカナ 한국어 \u1112\u1161\u11ab 中文，标点。混合english日本語テスト、第3章 𠮷野家",
    "Ünïcödé e\u0301 \u00e9 A\u030a \u212b \ufb01 ＦＵＬＬ ａ１ ı İ ß ẞ Σς naïve Ñandú Ελληνικά Русский ТЕКСТ",
    "שלום עולם \u202bמימין\u202c العَرَبِيَّة हिन्दी क्षि ไทยภาษา தமிழ் ខ្មែរ",
    "🙂👩\u200d👩\u200d👧🏽 🇩🇪 ❤\ufe0f ∀x∈ℝ → ±∞ € \ue000 𐎠 \u0007",
    "\u00a0nbsp\u2003em\u3000wide \u200bzero\u2028line\u0085next \ufeffbom soft\u00adhyphen",
    "def f(x):\n\tif x:\n        return  x  # y\n\t\t\n \n\n\n   \n\r\n\r\nend\rreturn \t mixed\t\ttabs\v\f \n ",
    '{"a": [1, -2.5e10], "b\\n": null}</p><br/>\n//!/ ./a/b.c //\n; !!!\n... ??? --- === //* $x->y != z &amp; `q` ~^|',
    "https://a.b/c?d=e&f#g @user .method() _private (paren) [x] {y} <z> a.b a,b a:b -1 +2 'q' \"r\" «s» „t“",
    "   spaces   behind   ",
)
#: Special tokens of many models: they reveal a token that one tokenizer has and another does not.
USUAL = (
    "<s></s><unk><pad><bos><eos><mask>[INST][/INST][CLS][SEP][TOOL_CALLS]<think></think><tool_call></tool_call>"
    "<tool_response></tool_response><|im_start|><|im_end|><|endoftext|><|begin_of_text|><|eot_id|><|python_tag|>"
    "<|start_header_id|><|start|><|channel|><|message|><|return|><start_of_turn><end_of_turn><|user|><|assistant|>"
    "<|vision_start|><|image_pad|><|fim_prefix|><｜begin▁of▁sentence｜><｜User｜><｜Assistant｜>"
)


def probe_text(added: Iterable[str], *, usual: bool = True) -> str:
    """Return the probe text for a tokenizer with these added tokens, each once between spaces and once between letters.
    `usual`: also contain special tokens of many other models."""
    tokens = "".join(f"x {token} y{token}Z" for token in added)
    return "\n".join([*KINDS, *([USUAL] if usual else []), f"{tokens} end  "])
