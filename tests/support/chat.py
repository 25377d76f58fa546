"""Chat templates and tokenizers of several kinds of models, and conversations for them.

The templates here are small ones in the manner of a family: what its answers end with, how it writes tools, what it
rewrites. Where no tokenizer of a family can be had, Qwen3's gets the family's special tokens.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from middleware_hub.openai_session.continuing.templates import Renderer
from middleware_hub.openai_session.sessions.turn import Context
from tests.support.tokenizers import tokenizer, tokenizer_directory

Message = dict[str, Any]

#: `<|user|>` and `<|observation|>` end an answer and begin the next message.
GLM = """[gMASK]<sop>
{%- if tools -%}<|system|>
# Tools
{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}{%- endif -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
<|assistant|>
{%- if m.reasoning_content and (loop.index0 > ns.last or (clear_thinking is defined and not clear_thinking)) -%}
{{ '<think>' + m.reasoning_content.strip() + '</think>' }}
{%- else -%}{{ '</think>' }}{%- endif -%}
{{- m.content.strip() -}}
{%- for call in m.tool_calls or [] -%}
{{ '<tool_call>' + call.function.name }}
{%- for k, v in call.function.arguments.items() -%}
{{ '<arg_key>' ~ k ~ '</arg_key><arg_value>' ~ (v if v is string else v | tojson) ~ '</arg_value>' }}
{%- endfor -%}
{{ '</tool_call>' }}
{%- endfor -%}
{%- elif m.role == 'tool' -%}
{{ '<|observation|>' if loop.first or messages[loop.index0 - 1].role != 'tool' else '' }}
{{- '<tool_response>' + m.content + '</tool_response>' }}
{%- else -%}
{{ '<|' + m.role + '|>' + m.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>{{ '</think>' if (enable_thinking is defined and not enable_thinking) else '<think>' }}
{%- endif -%}
"""

#: Thinks in every answer, and leaves the thoughts of earlier ones out.
NEMOTRON = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else '') }}
{%- if tools -%}{{ '\\n# Tools\\n' + (tools | tojson) }}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set dropped = (truncate_history_thinking | default(true)) and loop.index0 < ns.last -%}
{{- '<|im_start|>assistant\\n<think>' + ('' if dropped else m.reasoning_content | default('')) + '</think>' -}}
{{- m.content | trim -}}
{%- for call in m.tool_calls or [] -%}
{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' -}}
{%- for k, v in call.function.arguments | items -%}
{{- '<parameter=' ~ k ~ '>\\n' ~ (v if v is string else v | tojson) ~ '\\n</parameter>\\n' -}}
{%- endfor -%}
{{- '</function>\\n</tool_call>\\n' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif m.role == 'tool' -%}
{{- '<|im_start|>user\\n' if loop.first or messages[loop.index0 - 1].role != 'tool' else '' -}}
{{- '<tool_response>\\n' + m.content + '\\n</tool_response>\\n' -}}
{{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' else '' -}}
{%- elif not (loop.first and m.role == 'system') -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' + ('<think></think>' if enable_thinking is false else '<think>\\n') -}}
{%- endif -%}
"""

#: The last answer ends with `<|return|>`, an earlier one with `<|end|>`, one that calls a tool with `<|call|>`.
GPT_OSS = """
{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '<|end|>' -}}
{%- if tools or messages[0].role == 'system' -%}
{{- '<|start|>developer<|message|>' + (messages[0].content if messages[0].role == 'system' else '') -}}
{{- (tools | tojson) if tools else '' -}}{{- '<|end|>' -}}
{%- endif -%}
{%- set last = namespace(call=none) -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' and m.tool_calls -%}
{%- set call = m.tool_calls[0].function -%}
{%- set last.call = call.name -%}
{%- if m.reasoning_content -%}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' -}}
{%- endif -%}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' -}}
{{- (call.arguments | tojson) + '<|call|>' -}}
{%- elif m.role == 'assistant' -%}
{%- if loop.last and not add_generation_prompt -%}
{%- if m.reasoning_content -%}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' -}}
{%- endif -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' -}}
{%- else -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' -}}
{%- endif -%}
{%- set last.call = none -%}
{%- elif m.role == 'tool' -%}
{%- if last.call is none -%}
{{- raise_exception("Message has tool role, but there was no previous assistant message with a tool call!") -}}
{%- endif -%}
{{- '<|start|>functions.' + last.call + ' to=assistant<|channel|>commentary<|message|>' + (m.content | tojson) -}}
{{- '<|end|>' -}}
{%- elif m.role == 'user' -%}
{{- '<|start|>user<|message|>' + m.content + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""

#: The special tokens of families whose tokenizer cannot be had.
SPECIAL: Mapping[str, Sequence[str]] = {
    "glm47": ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    "kimi25": (
        *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
        *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    "minimax_m25": ("]~!b[", "]~b]", "[e~["),
}
SPECIAL = {**SPECIAL, "kimi26": SPECIAL["kimi25"], "minimax_m27": SPECIAL["minimax_m25"]}
TEMPLATES: Mapping[str, str] = {"glm47": GLM, "nemotron3": NEMOTRON, "gpt-oss": GPT_OSS}


#: What ends and begins a message, and nothing else; tools are written as text.
CHATML = """
{%- if tools -%}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content -}}
{%- for call in m.tool_calls or [] -%}
{{- '\\n<tool_call>' + (call.function.arguments | tojson) + '</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


@functools.cache
def family_tokenizer(family: str) -> Any:
    """A tokenizer of its own for one of the library's families or gpt-oss, with a chat template where it has one."""
    from transformers import AutoTokenizer

    name = {"gpt-oss": "gptoss", "deepseekv32": "deepseek_v3", "deepseekv4": "deepseek_v3"}.get(family, "qwen3")
    if family in SPECIAL:
        made = AutoTokenizer.from_pretrained(tokenizer_directory(name))
        made.add_special_tokens({"additional_special_tokens": list(SPECIAL[family])})
    else:
        made = copy.copy(tokenizer(name))
    if family in TEMPLATES:
        made.chat_template = TEMPLATES[family]
    elif family.startswith("deepseek"):
        made.chat_template = None
    return made


def with_template(template: str, name: str = "qwen3") -> Any:
    made = copy.copy(tokenizer(name))
    made.chat_template = template
    return made


def whole(renderer: Renderer, messages: Sequence[Mapping[str, Any]], context: Context) -> list[int]:
    """The ids of a conversation that an answer is due to, by what production renders and encodes with."""
    taken = renderer.as_engine_reads(messages)
    text = renderer.render(taken, context.tools, generation_prompt=True, template_kwargs=context.template_kwargs)
    return renderer.encode(text)


def checkpoint(directory: Path, model_type: str) -> str:
    (directory / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    return str(directory)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Tool {name}.",
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}, "n": {"type": "integer"}}},
        },
    }
    for name in ("search", "add")
]
TEXTS = (
    *("Hello", "naïve 世界 🚀", "  padded  ", "line\nline\n\n", "\n", "x", "<|im_end|>", "</think> no", '{"q": 1}'),
    *("<tool_response>fake</tool_response>", "<|user|>", "a  b\t", "\N{REPLACEMENT CHARACTER}é", "日本語のテキスト"),
)


def call(rng: random.Random, call_id: str) -> Message:
    name = rng.choice(("search", "add"))
    arguments = rng.choice(('{"q": "x"}', '{ "n":1,"q":"é" }', '{"q":"<|im_end|>"}', "{}"))
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def answer(rng: random.Random, *, calls: int = 0, turn: int = 0) -> Message:
    message: Message = {"role": "assistant", "content": rng.choice(TEXTS[:4])}
    if rng.random() < 0.7:
        message["reasoning_content"] = rng.choice(TEXTS[:4])
    if calls:
        message["content"] = rng.choice((None, "", "I look it up."))
        message["tool_calls"] = [call(rng, f"call_{turn}_{place}") for place in range(calls)]
    return message


def results(rng: random.Random, message: Message) -> list[Message]:
    return [
        {"role": "tool", "tool_call_id": each["id"], "name": each["function"]["name"], "content": rng.choice(TEXTS)}
        for each in message["tool_calls"]
    ]


def conversation(rng: random.Random, turns: int, *, tools: bool) -> list[Message]:
    """A history that ends with what an answer is due to."""
    messages: list[Message] = [{"role": "system", "content": rng.choice(TEXTS[:4])}] if rng.random() < 0.7 else []
    messages.append({"role": "user", "content": rng.choice(TEXTS[:4])})
    for turn in range(turns):
        calls = rng.randint(0, 2) if tools else 0
        message = answer(rng, calls=calls, turn=turn)
        messages.append(message)
        messages += results(rng, message) if calls else [{"role": "user", "content": rng.choice(TEXTS)}]
    return messages
